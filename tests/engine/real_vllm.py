"""A real ``vllm serve`` as a child process, small enough for a CPU.

Where it is comes from the environment: ``VLLM`` is the command (a path, or a name in PATH), ``MODEL`` the
folder of a small model. Everything else that decides what the engine does stands here.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.demo.process import Process, answers

HOST = "127.0.0.1"
#: vLLM on a CPU takes multiples of 32 only.
BLOCK_TOKENS = 32
MAX_NUM_BATCHED_TOKENS = 2048
MODEL_NAME = "small"
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 300.0

#: One thread a server; no look at the network; nothing that only a GPU has.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # saves a process and its 600 MB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class Lab:
    """What the environment names."""

    vllm: str
    model: str


def find() -> Lab:
    """The environment's vLLM and model. Raises RuntimeError that says which variable is wrong."""
    command = os.environ.get("VLLM") or "vllm"
    vllm = shutil.which(command)
    if vllm is None:
        raise RuntimeError(f"VLLM: {command!r} is no command; set it to a vLLM, such as /opt/vllm/bin/vllm")
    model = os.environ.get("MODEL", "")
    if not (Path(model) / "config.json").is_file():
        raise RuntimeError(f"MODEL: {model!r} has no config.json; set it to the folder of a small model")
    return Lab(vllm, str(Path(model).resolve()))


class Server:
    """One engine with ``num_blocks`` blocks, one of which is a placeholder, on a port of its own."""

    def __init__(self, lab: Lab, port: int, num_blocks: int, folder: Path) -> None:
        self.port = port
        self.num_blocks = num_blocks
        self.address = f"{HOST}:{port}"
        self.url = f"http://{self.address}"
        command = ["env", *(f"{name}={value}" for name, value in _ENVIRONMENT.items())]
        command += ["nice", "-n", "10", lab.vllm, "serve", lab.model, "--served-model-name", MODEL_NAME]
        command += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(num_blocks)]
        command += ["--max-model-len", str(self.cache_tokens), "--kv-cache-memory-bytes", str(256 * 2**20)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--max-num-seqs", "64"]
        health = self.url + "/health"
        self.process = Process(f"vllm-{port}", command, folder / f"vllm-{port}.log", lambda: answers(health))

    @property
    def cache_tokens(self) -> int:
        """What the KV cache holds; also the longest sequence."""
        return (self.num_blocks - 1) * BLOCK_TOKENS

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request; status, headers in lower case, body. ``body``: bytes as they are, else JSON."""
        return ask(self.address, method, path, body, headers)

    def complete(self, **fields: Any) -> Any:
        """A completion that has to succeed."""
        body = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
        status, _, reply = self.ask("POST", "/v1/completions", body)
        assert status == 200, reply
        return json.loads(reply)

    def counter(self, name: str) -> float:
        """A counter or gauge of its metrics page, such as ``prefix_cache_hits_total``."""
        _, _, page = self.ask("GET", "/metrics")
        found = re.search(rf"^vllm:{name}\{{.*?\}} (\S+)$", page.decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def reset(self) -> None:
        """Empty its prefix cache."""
        status, _, reply = self.ask("POST", "/reset_prefix_cache")
        assert status == 200, reply


@contextmanager
def serve(lab: Lab, ports: list[int], num_blocks: int, folder: Path) -> Iterator[list[Server]]:
    """Servers of one size, started side by side."""
    servers = [Server(lab, port, num_blocks, folder) for port in ports]
    try:
        for server in servers:
            server.process.start()
        for server in servers:
            server.process.wait_ready(START_TIMEOUT_S)
        yield servers
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.process.stop()
            # The engine is a child of the server; it must not outlive a server that had to be killed.
            with suppress(ProcessLookupError, TypeError):
                os.killpg(server.process.pid, signal.SIGKILL)


def ask(
    address: str, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One request to ``host:port`` on a connection of its own; see `Server.ask`."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
    try:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()
