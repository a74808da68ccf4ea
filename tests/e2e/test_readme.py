"""Each command in the README runs.

Those of the five-minute set-up run as they stand there, in a network of their own (``unshare``), because
they use the ports that Envoy's YAML names. The rest is run small, or held against what runs it elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import yaml

from extproc.cli import COMMANDS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def commands() -> list[str]:
    """Every command: the lines of the sh blocks, without comments, and what stands inline."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    lines = [re.sub(r"((^|\s)#.*|&\s*(#.*)?$)", "", line).strip() for line in blocks.splitlines()]
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    inline = re.findall(r"`((?:extproc|make|docker compose|curl|pip|kubectl|envoy) [^|`\n]+)`", prose)
    names = {f"extproc {name}" for name in COMMANDS}  # where prose speaks of a command
    return list(dict.fromkeys([*filter(None, lines), *(code for code in inline if code not in names)]))


#: Run as they stand, in this order, on one machine.
WORKERS = "for port in 8001 8002 8003 8004; do extproc worker --port $port & done"
SET_UP = [
    "extproc serve --envoy-config envoy/envoy.yaml --metrics 127.0.0.1:9090 --page",
    "envoy -c envoy/envoy.yaml",
]
AGAINST_IT = [
    "extproc doctor --envoy-config envoy/envoy.yaml",
    "extproc traffic --seconds 30",
    "extproc top",
    "curl -s 127.0.0.1:9090/metrics | grep extproc_decisions_total",
    "extproc explain --body request.json --server http://127.0.0.1:9090",
]

#: Run by themselves.
ALONE = [
    "extproc lint requests.jsonl",
    "extproc simulate --workload swarm-100",
    "extproc simulate --trace FILE.jsonl --load 0.7 --report r.html",
    "extproc bench prompt",
    "extproc bench decide",
]

#: Too long or too big to run here; the file that runs them.
ELSEWHERE = {
    "make run": "tests/e2e/test_demo.py",
    'make run ARGS="--keep"': "tests/e2e/test_demo.py",
    "make test": "",
    "extproc demo --help": "tests/e2e/test_demo.py",
    "kubectl apply -k envoy/istio": "tests/e2e/test_istio.py",
    "pip install '.[local]'": "",
}


def test_no_command_is_left_out():
    known = {WORKERS, *SET_UP, *AGAINST_IT, *ALONE, *ELSEWHERE}
    assert [c for c in commands() if c not in known and not c.startswith("docker compose")] == []
    assert [c for c in known if c not in commands()] == []


def test_prose_speaks_of_commands_that_there_are():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    spoken = set(re.findall(r"`extproc ([a-z-]+)", prose))
    assert spoken <= set(COMMANDS)
    assert spoken


def test_what_runs_the_others_is_there():
    for command, file in ELSEWHERE.items():
        assert not file or (ROOT / file).is_file(), command


def test_compose_commands_name_what_is_there():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
    found = [command for command in commands() if command.startswith("docker compose")]
    assert found
    for command in found:
        words = shlex.split(command)[2:]
        while words and words[0] == "--profile":
            assert words[1] in profiles
            words = words[2:]
        assert words[0] in ("up", "exec")
        names = [word for word in words[1:] if not word.startswith("-")]
        assert words[0] == "exec" or set(names) <= set(services)
        if words[0] == "exec":
            assert names[0] in services
            assert names[1:] == ["extproc", "top"]


@pytest.mark.parametrize("target", ["run", "test"])
def test_make_knows_the_targets(target):
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"run": "extproc demo", "test": "-m pytest"}[target] in shown.stdout


def test_it_installs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, ROOT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bin" / "extproc").is_file()
    for shipped in ("_envoy/envoy.yaml", "live/page.html"):
        assert (tmp_path / "extproc" / shipped).is_file()


def body(text: str, minute: int) -> dict[str, object]:
    return {
        "model": "emulated",
        "messages": [
            {"role": "system", "content": f"It is 10:{minute:02d}. {text}"},
            {"role": "user", "content": f"Case {minute}"},
        ],
    }


def run(command: str, cwd: Path, *, ok: tuple[int, ...] = (0,)) -> str:
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in ok, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def desk(tmp_path):
    """A folder with the files that the README's commands name."""
    rules = "Follow the rules. " * 2000
    (tmp_path / "envoy").symlink_to(ROOT / "envoy")
    (tmp_path / "request.json").write_bytes(msgspec.json.encode(body(rules, 0)))
    lines = [msgspec.json.encode(body(rules, minute)) for minute in range(30)]
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "FILE.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path


def test_what_needs_no_set_up(desk):
    lint, swarm, trace, prompt, decide = ALONE
    assert "timestamp" in run(lint, desk, ok=(1,)).lower()
    run(prompt, desk)
    run(decide, desk)
    for command in (swarm, trace):
        assert run(f"{command.split(' --')[0]} --help", desk)
    run(trace, desk)
    assert (desk / "r.html").is_file()


def private_network() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rn", "true"], check=False).returncode == 0


INSIDE = """
    import fcntl, os, shlex, signal, socket, struct, subprocess, sys, time, urllib.request
    fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: lo is up
    def wait(url):
        for _ in range(300):
            try:
                return urllib.request.urlopen(url, timeout=2).read()
            except OSError:
                time.sleep(0.2)
        sys.exit(f"{url} doesn't answer")
    os.setpgid(0, 0)  # a group of its own, to end it as one
    running = []
    try:
        running.append(subprocess.Popen(WORKERS + "; wait", shell=True, stdout=subprocess.DEVNULL))
        for port in range(8001, 8005):
            wait(f"http://127.0.0.1:{port}/health")
        for command in SET_UP:
            running.append(subprocess.Popen(shlex.split(command), stderr=open("log", "a")))
        for url in ("http://127.0.0.1:9090/metrics", "http://127.0.0.1:9091/", "http://127.0.0.1:8080/v1/models"):
            wait(url)
        for command in AGAINST_IT:
            done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
            print(f"$ {command}", done.stdout, done.stderr, sep="\\n", flush=True)
            if done.returncode:
                sys.exit(f"{command}: exit status {done.returncode}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # all that was started here, also by shells
        for process in running:
            process.wait(60)
"""


def test_the_five_minute_set_up(desk):
    if not private_network():
        pytest.skip("needs a network namespace of its own: root, or unprivileged `unshare -rn`")
    script = desk / "inside.py"
    shorter = [command.replace("--seconds 30", "--seconds 8") for command in AGAINST_IT]
    shorter = [command + " --once" if command == "extproc top" else command for command in shorter]
    script.write_text(
        f"WORKERS = {WORKERS!r}\nSET_UP = {SET_UP!r}\nAGAINST_IT = {shorter!r}\n{textwrap.dedent(INSIDE)}"
    )
    shown = run(f"unshare -rn {sys.executable} {script}", desk)
    assert "affinity" in shown
    assert "pick: 127.0.0.1:80" in shown
