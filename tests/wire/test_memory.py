"""However a stream ends, the server keeps nothing of it.

Bytes are counted where they are allocated, by the C library and by Python, not as the process's size, which
goes up and down as it likes. What fills up once is told from what is lost by rounds of the same traffic: the
least growth of a round, over some rounds, is what each round loses.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig
from extproc.loop import Loop
from extproc.observe.logs import configure
from extproc.observe.observer import Observer
from extproc.router import Router
from extproc.server import Server
from extproc.wire import (
    PROCESS_PATH,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProtocolConfiguration,
)

STREAMS = 50  # at once
BATCHES = 5
ROUNDS = 4

#: So many readings in a row, 10 ms apart, that don't fall any more.
QUIET_READINGS = 5

#: A lost batch of operations alone is 80 bytes, and one that sends has its message besides.
MOST_BYTES_A_STREAM = 40


# --- the server's process ----------------------------------------------------------------------------


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, malloc/malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """What the C library has given out."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def busy() -> int:
    """Tasks and sockets that there are."""
    count = len(asyncio.all_tasks())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder is gone
            count += str(file.readlink()).startswith("socket:")
    return count


async def settled(idle: int) -> tuple[int, int]:
    """`heap_bytes` and Python's blocks once streams and connections that are over have been cleared away."""
    while busy() > idle:  # noqa: ASYNC110 - gRPC tells nobody
        await asyncio.sleep(0.01)
    gc.collect()
    least, quiet = heap_bytes(), 0
    while quiet < QUIET_READINGS:
        await asyncio.sleep(0.01)
        now = heap_bytes()
        quiet = 0 if now < least else quiet + 1
        least = min(least, now)
    return least, sys.getallocatedblocks()


async def serve() -> None:
    """Tell the address, then what is allocated whenever a line comes."""
    configure("error")
    endpoints = tuple(EndpointConfig("10.0.0.1", 8000 + i, "pool", 10_000) for i in range(4))
    observer = Observer()
    settings = PoolSettings(cache_tokens=1)  # else the picture of the caches fills up meanwhile
    router = Router(RouterConfig(pools={"pool": PoolConfig("pool", endpoints, settings)}), observer)
    server = Server(router, observer)
    print(await server.start("127.0.0.1:0"), flush=True)
    idle = busy()
    while await asyncio.to_thread(sys.stdin.readline):
        found = await settled(idle)
        print(*found, observer.registry.get_sample_value("extproc_internal_errors_total"), flush=True)


class Child:
    """The server, as seen from here."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line().rpartition(":")[2])

    def allocated(self) -> tuple[int, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        in_bytes, blocks, errors = self._line().split()
        assert float(errors) == 0
        return int(in_bytes), int(blocks)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library doesn't tell what it has given out")
    child = Child()
    for way, phase in WAYS:  # threads start, pools of memory fill up
        for _ in range(BATCHES):
            end_in_a_way(child.port, way, phase)
    yield child
    child.end()


# --- a client that can do what gRPC's can't ----------------------------------------------------------

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_CANCEL = 8


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """RFC 9113, section 4.1."""
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def _fields(fields: dict[str, str]) -> bytes:
    """RFC 7541, section 6.2.2: literals without indexing; names and values under 127 bytes."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def _message(message: ProcessingRequest) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def _headers(**fields: str) -> HttpHeaders:
    pairs = [HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    return HttpHeaders(headers=HeaderMap(headers=pairs))


OPEN = _fields({":method": "POST", ":scheme": "http", ":path": PROCESS_PATH, ":authority": "x"}) + _fields(
    {"te": "trailers", "content-type": "application/grpc"}
)
BUFFERED = ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED)
MESSAGES = [
    _message(
        ProcessingRequest(request_headers=_headers(**{":path": "/v1/completions"}), protocol_config=BUFFERED)
    ),
    _message(ProcessingRequest(request_body=HttpBody(body=b'{"prompt": "Once"}', end_of_stream=True))),
    _message(ProcessingRequest(response_headers=_headers(**{":status": "200"}))),
]


class Connection:
    """`STREAMS` streams of one connection, all doing the same."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.settimeout(60.0)
        self._file = self._socket.makefile("rb")
        self._replies: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._streams = range(1, 1 + 2 * STREAMS, 2)
        self._send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))
        self._each(_HEADERS, _END_HEADERS, OPEN)

    def say(self, message: bytes) -> None:
        self._each(_DATA, 0, message)

    def finish(self) -> None:
        self._each(_DATA, _END_STREAM)

    def reset(self) -> None:
        self._each(_RST_STREAM, 0, struct.pack(">I", _CANCEL))

    def hear(self, replies: int) -> None:
        """Wait until each stream had so many replies."""
        while any(self._replies[stream] < replies for stream in self._streams):
            self._next()

    def hear_the_end(self) -> None:
        while len(self._ended) < STREAMS:
            self._next()

    def drop(self) -> None:
        self._file.close()
        self._socket.close()

    def _next(self) -> None:
        head = self._file.read(9)
        assert len(head) == 9, "the server hung up"
        length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + head)
        payload = self._file.read(length)
        assert kind not in (_GOAWAY, _RST_STREAM)
        if kind == _DATA:
            self._replies[stream] += 1
        if kind in (_HEADERS, _DATA) and flags & _END_STREAM:
            self._ended.add(stream)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._send(_frame(kind, _ACK, 0, payload if kind == _PING else b""))

    def _each(self, kind: int, flags: int, payload: bytes = b"") -> None:
        self._send(b"".join([_frame(kind, flags, stream, payload) for stream in self._streams]))

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)


WAYS = [("quiet, finish", 3), ("reset", 2), ("finish, reset", 2), ("drop", 2)]


def end_in_a_way(port: int, way: str, phase: int) -> None:
    """``phase``: messages before the end; the last one's reply is under way then, but for "quiet" ways."""
    connection = Connection(port)
    for replies, message in enumerate(MESSAGES[:phase]):
        connection.hear(replies)
        connection.say(message)
    if way.startswith("quiet"):
        connection.hear(phase)
    if "finish" in way:
        connection.finish()
    if "reset" in way:
        connection.reset()
    elif way.endswith("finish"):
        connection.hear_the_end()
    connection.drop()


# --- the tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "phase"), WAYS)
def test_nothing_stays_of_a_stream(child: Child, way: str, phase: int) -> None:
    seen = [child.allocated()]
    for _ in range(ROUNDS):
        for _ in range(BATCHES):
            end_in_a_way(child.port, way, phase)
        seen.append(child.allocated())
    lost_bytes = min(after[0] - before[0] for before, after in pairwise(seen))
    lost_blocks = min(after[1] - before[1] for before, after in pairwise(seen))
    streams = STREAMS * BATCHES
    assert lost_bytes < MOST_BYTES_A_STREAM * streams, f"{lost_bytes / streams:.0f} bytes a stream"
    assert lost_blocks < 0.2 * streams, f"{lost_blocks / streams:.1f} of Python's blocks a stream"


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(serve())
