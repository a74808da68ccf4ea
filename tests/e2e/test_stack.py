"""Child processes and whole set-ups: they start, fail with a reason, and leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from extproc.demo.process import Process, ProcessError, accepts, free_ports
from extproc.demo.stack import HOST, Stack, StackConfig

pytestmark = pytest.mark.e2e


def test_a_child_that_ends_early_tells_why(tmp_path):
    script = "import sys; print('no such model'); sys.exit(3)"
    child = Process("engine", [sys.executable, "-c", script], tmp_path / "log", lambda: False)
    child.start()
    with pytest.raises(ProcessError, match=r"(?s)engine ended with exit code 3.*no such model"):
        child.wait_ready()


def test_a_child_that_never_gets_ready(tmp_path):
    child = Process("engine", ["sleep", "60"], tmp_path / "log", lambda: False)
    child.start()
    with pytest.raises(ProcessError, match="not ready after 0 s"):
        child.wait_ready(timeout_s=0.2)
    assert child.stop() == -signal.SIGTERM
    assert not child.running


def test_children_end_with_a_parent_that_is_killed(tmp_path):
    (port,) = free_ports(1)
    script = (
        "import sys, time; from pathlib import Path; from extproc.demo.process import Process\n"
        f"command = [sys.executable, '-m', 'extproc.cli', 'worker', '--port', '{port}']\n"
        f"Process('worker', command, Path({str(tmp_path / 'log')!r}), bool).start(); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    wait(lambda: accepts(HOST, port))
    parent.kill()
    parent.wait()
    wait(lambda: not accepts(HOST, port))


def test_a_set_up_that_fails_leaves_nothing_running():
    stack = Stack(StackConfig(workers=1, worker_arguments=("--speedup", "0")))
    with pytest.raises(ProcessError, match=r"(?s)worker-0 ended.*0 is not above 0"):
        stack.start()
    assert not any(process.running for process in stack.processes)
    assert stack.envoy_config.exists()
    stack.stop()
    assert not stack.folder.exists()


def test_a_demo_that_is_kept_answers_until_it_is_told_to_end():
    arguments = ["--workers", "2", "--personas", "2", "--streams", "2", "--requests", "2", "--speedup", "50"]
    command = [sys.executable, "-m", "extproc.cli", "demo", *arguments, "--rows", "swarm", "--keep"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        curl = next(line for line in demo.stdout if line.startswith("curl "))
        url, body = curl.split()[2], curl.split("-d '")[1].rstrip("'\n")
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 20
    finally:
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 0
    port = int(url.split(":")[2].partition("/")[0])
    assert not accepts(HOST, port)


def wait(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
