"""Bring docker-compose.yml up, use it as a newcomer would, break it, and take it down.

Needs a Docker engine and Compose (plugin, or docker-compose 1.29); not part of `make test`. Run by
`make compose-test`; exits 0 when every step held.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"extproc-check-{os.getpid()}"
#: Eight prompts of some 2,000 tokens: long enough to be worth an affinity.
PROMPTS = [f"You are agent {number}. " + f"Rule {number} is to be followed. " * 250 for number in range(8)]
#: Host ports by the variable that docker-compose.yml reads them from.
PORTS: dict[str, int] = {}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def compose_command() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        try:
            if subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            continue
    sys.exit("compose-test: neither `docker compose` nor `docker-compose` is here")


def compose(*arguments: str) -> str:
    result = subprocess.run(
        [*compose_command(), "-p", PROJECT, *arguments],
        cwd=ROOT,
        env=os.environ | {name: str(port) for name, port in PORTS.items()},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"compose-test: `{' '.join(arguments)}` exited with status {result.returncode}")
    return result.stdout


def ask(prompt: str) -> tuple[int, str]:
    """Send one chat request: the status, and what x-extproc-decision says of the pick ("" without it)."""
    body = {"model": "emulated", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS['HTTP_PORT']}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return response.status, response.headers.get("x-extproc-decision", "")
    except urllib.error.HTTPError as error:
        return error.code, ""


def workers_of(prompts: list[str]) -> list[str]:
    """The worker that answered each prompt, each asked once; every request must be answered and routed."""
    workers = []
    for prompt in prompts:
        status, decision = ask(prompt)
        assert status == 200, f"answered {status}"
        match = re.search(r"worker=([\d.]+:\d+)", decision)
        assert match, f"not routed: x-extproc-decision is {decision!r}"
        workers.append(match[1])
    return workers


def settled() -> list[str]:
    """The prompts' workers, after asking each prompt five times: it must have stayed on its first."""
    homes = workers_of(PROMPTS)
    for _ in range(4):
        assert workers_of(PROMPTS) == homes
    assert len(set(homes)) > 1, f"{len(PROMPTS)} prompts all went to {homes[0]}"
    return homes


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for: {what}"
        time.sleep(0.5)


def routed() -> bool:
    status, decision = ask("Hello")
    return status == 200 and decision != ""


@contextmanager
def step(name: str) -> Iterator[None]:
    print(f"{name} ...", end=" ", flush=True)
    started = time.monotonic()
    yield
    print(f"ok ({time.monotonic() - started:.1f} s)", flush=True)


def greeted() -> bool:
    """Whether ``hello`` has ended, and well."""
    hello = compose("ps", "-q", "hello").strip()
    status, code = docker("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", hello).split()
    assert status != "exited" or code == "0", f"hello exited with status {code}"
    return status == "exited"


def check() -> None:
    with step("hello shows the first routed answers"):
        wait_for("hello's end", greeted)
        assert re.search(r"in all: 2 requests .*affinity 1", compose("logs", "--no-color", "hello"))
    with step("every prompt stays on its worker"):
        settled()
    with step("metrics show the decisions"):
        url = f"http://127.0.0.1:{PORTS['METRICS_PORT']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith("extproc_decisions_total{")]
        assert sum(counts) >= 5 * len(PROMPTS), counts
    with step("affinity shows on the page and in top"):
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS['PAGE_PORT']}/", timeout=10) as response:
            assert response.headers.get_content_type() == "text/html"
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS['PAGE_PORT']}/status", timeout=10) as response:
            (pool,) = json.load(response)["pools"]
        assert len(pool["workers"]) == 4
        assert pool["prefixes"]
        assert all(len(prefix["spread"]) == 1 for prefix in pool["prefixes"])
        assert "affinity" in compose("exec", "-T", "router", "extproc", "top", "--once")
    with step("router killed: answers still come"):
        compose("kill", "router")
        for prompt in PROMPTS * 3:
            status, decision = ask(prompt)
            assert (status, decision) == (200, "")
    with step("router started again: every prompt stays on its worker"):
        compose("start", "router")
        wait_for("the router's return", routed)
        homes = settled()
    with step("worker killed: its prompts move, the others stay"):
        victim = homes[0]
        services = {address_of(name): name for name in ("worker-1", "worker-2", "worker-3", "worker-4")}
        compose("kill", services[victim])
        moved = workers_of(PROMPTS)
        assert victim not in moved
        assert all(after == before for before, after in zip(homes, moved, strict=True) if before != victim)
    with step("router stopped: it drains and exits by itself"):
        router = compose("ps", "-q", "router").strip()
        compose("stop", "router")
        assert docker("inspect", "--format", "{{.State.ExitCode}}", router) == "0"


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def address_of(service: str) -> str:
    container = compose("ps", "-q", service).strip()
    template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return docker("inspect", "--format", template, container) + ":8000"


def main() -> int:
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        sys.exit("compose-test: no Docker engine answers (`docker info` fails)")
    PORTS.update(zip(("HTTP_PORT", "ADMIN_PORT", "METRICS_PORT", "PAGE_PORT"), free_ports(4), strict=True))
    try:
        with step("build"):
            compose("build", "--quiet")
        with step("up"):
            compose("up", "--detach")
            wait_for("a routed answer", routed)
        check()
    except BaseException:
        print(compose("logs", "--tail", "40"), flush=True)
        raise
    finally:
        compose("down", "--volumes", "--remove-orphans", "--timeout", "3")
    return 0


if __name__ == "__main__":
    sys.exit(main())
