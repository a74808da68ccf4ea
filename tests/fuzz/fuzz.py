"""Random bodies and random ext_proc messages against a whole router, in one process and without a network.

``make fuzz CASES=1000000``. A case is a body that is read and hashed, a stream's life with messages in any
order, or a damaged message. What must hold: no exception escapes; each reply is of the request's own kind, or
an immediate response to a part of the request; after the last stream's end every count is zero.

Cases come in worlds, each with a router, a fleet and settings of its own, while workers come, go and fail. A
world is drawn from one number, which a failure prints: ``fuzz.py --world NUMBER`` repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import bodies
from google.protobuf.message import DecodeError

from extproc.exchange import Exchange
from extproc.facts import RequestFacts
from extproc.fleet.config import EndpointConfig, PoolConfig, PoolSettings, RouterConfig, Steering
from extproc.fleet.settings import POLICIES, RouteOverrides
from extproc.observe.logs import configure
from extproc.observe.observer import Observer
from extproc.prefix import chain
from extproc.prompt import Prompt, Unreadable, read_prompt
from extproc.router import Router
from extproc.routing.demand import HEADERS
from extproc.routing.health import Probe
from extproc.routing.pool import Pool
from extproc.wire import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

CASES_PER_WORLD = 1000
MAX_OPEN = 12
MAX_BODY_BYTES = 2500

_MODES = (
    ProcessingMode.BUFFERED,
    ProcessingMode.STREAMED,
    ProcessingMode.BUFFERED_PARTIAL,
    ProcessingMode.FULL_DUPLEX_STREAMED,
    ProcessingMode.NONE,
)
_REQUEST_KINDS = {"request_headers": 0, "request_body": 1, "request_trailers": 2}
_ODD_TEXTS = (
    "",
    "0",
    "1",
    "-1",
    "nan",
    "1e9",
    "9" * 30,
    "x" * 300,
    "\u00e9\U0001f600",
    "٣",
    "200",
    "503",
    "42",
)
_ODD_NUMBERS = (0.0, 1.0, 2.0, 5.0, -3.0, 1e300, float("nan"), float("inf"), 0.5)


class World:
    """One router and what is done to it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.now = rng.uniform(0.0, 1e6)
        self.settings = self._settings()
        self.router = Router(self._config(), Observer())
        self.pools: set[Pool] = set(self.router.pools.values())
        self.open: list[Exchange] = []

    def run(self, cases: int) -> None:
        """So many cases, then everything ends."""
        for _ in range(cases):
            self.now += self.rng.choice((0.0, 0.001, 0.05, 0.5, 5.0))
            kind = self.rng.random()
            if kind < 0.4:
                self._read()
            elif kind < 0.9:
                self._live()
            else:
                self._misread()
            if self.rng.random() < 0.02:
                self._disturb()
        while self.open:
            self._close(self.open.pop())
        self._expect_nothing()

    # --- bodies ----------------------------------------------------------------------------------

    def _read(self) -> None:
        rng = self.rng
        path, body = bodies.draw(rng)
        prompt = read_prompt(
            path + rng.choice(("", "?a=b")),
            rng.choice(("application/json", "application/json; charset=utf-8", "", "text/plain"))
            if rng.random() < 0.1
            else "application/json",
            "" if rng.random() < 0.98 else "gzip",
            body,
            content_format=rng.choice(("string", "openai")),
        )
        if isinstance(prompt, Unreadable):
            self.done["unreadable bodies"] += 1
            return
        assert isinstance(prompt, Prompt)
        self.done["bodies read"] += 1
        assert 0 <= prompt.head_bytes <= prompt.opening_bytes <= len(prompt.text)
        block_tokens = rng.choice((1, 16, 256))
        chars_per_token = rng.choice((0.7, 1.0, 4.0))
        found = chain(
            prompt,
            block_tokens=block_tokens,
            chars_per_token=chars_per_token,
            prefix_tokens=rng.choice((1, 512, 4096)),
        )
        if prompt.token_ids is None:
            blocks = len(prompt.text) // max(1, int(block_tokens * chars_per_token))
        else:
            blocks = len(prompt.token_ids) // block_tokens
        assert len(found.hashes) == blocks
        assert all(0 <= value < 2**64 for value in (*found.hashes, found.key))
        assert found.tokens >= 0

    # --- streams ---------------------------------------------------------------------------------

    def _live(self) -> None:
        """A new stream; it, or another one, gets some messages, and some streams end."""
        rng = self.rng
        self.done["streams"] += 1
        overrides = RouteOverrides(
            pool=rng.choice(("a", "b", "none")) if rng.random() < 0.1 else None,
            policy=rng.choice(POLICIES) if rng.random() < 0.1 else None,
            debug=rng.random() < 0.3,
            priority=rng.choice((None, None, -4, 0, 4)),
        )
        exchange = Exchange(self.router, overrides, MAX_BODY_BYTES)
        self.open.append(exchange)
        mode = rng.choice(_MODES) if rng.random() < 0.95 else None
        messages = self._usual(mode) if rng.random() < 0.6 else self._unusual(mode)
        for message in messages:
            self._deliver(exchange if rng.random() < 0.9 else rng.choice(self.open), message)
        while len(self.open) > MAX_OPEN or (self.open and rng.random() < 0.45):
            self._close(self.open.pop(rng.randrange(len(self.open))))

    def _usual(self, mode: int | None) -> list[ProcessingRequest]:
        """In the order in which Envoy sends them, up to a point."""
        rng = self.rng
        path, body = bodies.draw(rng)
        pieces = [body]
        if mode not in (ProcessingMode.BUFFERED, None) and rng.random() < 0.5:
            cut = rng.randint(0, len(body))
            pieces = [body[:cut], body[cut:]]
        trailers = rng.random() < 0.1
        messages = [self._request_headers(mode, path, end=rng.random() < 0.05)]
        messages += [
            ProcessingRequest(
                request_body=HttpBody(body=piece, end_of_stream=not trailers and index == len(pieces) - 1)
            )
            for index, piece in enumerate(pieces)
        ]
        if trailers:
            messages.append(ProcessingRequest(request_trailers=HttpTrailers()))
        messages.append(self._response_headers())
        messages += [
            ProcessingRequest(response_body=HttpBody(body=b"data", end_of_stream=True)),
            ProcessingRequest(response_trailers=HttpTrailers()),
        ][: rng.randint(0, 2)]
        return messages if rng.random() < 0.7 else messages[: rng.randint(0, len(messages))]

    def _unusual(self, mode: int | None) -> list[ProcessingRequest]:
        rng = self.rng
        messages = []
        for _ in range(rng.randint(1, 6)):
            match rng.randrange(8):
                case 0 | 1:
                    message = self._request_headers(
                        rng.choice((mode, *_MODES)), rng.choice(bodies.PATHS), end=rng.random() < 0.2
                    )
                case 2 | 3:
                    body = HttpBody(body=bodies.draw(rng)[1], end_of_stream=rng.random() < 0.6)
                    message = ProcessingRequest(request_body=body)
                case 4:
                    message = ProcessingRequest(request_trailers=HttpTrailers())
                case 5:
                    message = self._response_headers()
                case 6:
                    message = ProcessingRequest(
                        response_body=HttpBody(body=b"x", end_of_stream=rng.random() < 0.5)
                    )
                case _:
                    message = rng.choice(
                        (ProcessingRequest(response_trailers=HttpTrailers()), ProcessingRequest())
                    )
            message.observability_mode = rng.random() < 0.05
            messages.append(message)
        return messages

    def _request_headers(self, mode: int | None, path: str, *, end: bool) -> ProcessingRequest:
        rng = self.rng
        fields = {
            ":path": path.encode(),
            "content-type": b"application/json",
            "x-request-id": b"r",
        }
        while rng.random() < 0.4:
            name = rng.choice((*sorted(HEADERS), "x-tenant", "content-encoding", ":path", "x-other"))
            fields[name] = rng.randbytes(8) if rng.random() < 0.1 else rng.choice(_ODD_TEXTS).encode()
        message = ProcessingRequest(
            request_headers=HttpHeaders(
                headers=HeaderMap(headers=[HeaderValue(key=k, raw_value=v) for k, v in fields.items()]),
                end_of_stream=end,
            )
        )
        if mode is not None:
            message.protocol_config.CopyFrom(
                ProtocolConfiguration(
                    request_body_mode=mode,
                    response_body_mode=rng.choice((ProcessingMode.NONE, ProcessingMode.FULL_DUPLEX_STREAMED)),
                )
            )
        if rng.random() < 0.2:
            name = rng.choice(("a", "b", "unheard"))
            message.attributes["envoy.filters.http.ext_proc"]["xds.cluster_name"] = name
        return message

    def _response_headers(self) -> ProcessingRequest:
        rng = self.rng
        status = rng.choice(("200", "200", "400", "429", "500", "503", "504", *_ODD_TEXTS))
        message = ProcessingRequest(
            response_headers=HttpHeaders(
                headers=HeaderMap(headers=[HeaderValue(key=":status", value=status)]),
                end_of_stream=rng.random() < 0.1,
            )
        )
        if rng.random() < 0.8:
            seen = message.attributes[rng.choice(("envoy.filters.http.ext_proc", "other"))]
            if rng.random() < 0.9:
                seen["upstream.address"] = (
                    f"10.0.0.1:{8000 + rng.randrange(8)}" if rng.random() < 0.9 else rng.choice(_ODD_TEXTS)
                )
            if rng.random() < 0.9:
                seen["upstream.request_attempt_count"] = rng.choice(_ODD_NUMBERS)
        return message

    def _misread(self) -> None:
        """A damaged message: gRPC refuses it, or it is one like any other."""
        rng = self.rng
        whole = rng.choice((self._usual, self._unusual))(rng.choice(_MODES))
        data = bytearray((rng.choice(whole) if whole else ProcessingRequest()).SerializeToString())
        for _ in range(rng.choice((1, 1, 2, 5))):
            if data and rng.random() < 0.7:
                data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
            else:
                at = rng.randint(0, len(data))
                data[at:at] = rng.randbytes(rng.randint(1, 6))
        try:
            message = ProcessingRequest.FromString(bytes(data))
        except DecodeError:
            self.done["messages that are none"] += 1
            return
        self.done["damaged messages"] += 1
        if not self.open:
            self.open.append(Exchange(self.router, RouteOverrides(), MAX_BODY_BYTES))
        self._deliver(rng.choice(self.open), message)

    def _deliver(self, exchange: Exchange, message: ProcessingRequest) -> None:
        self.now += 0.001
        replies = exchange.receive(message, self.now)
        self.done["messages"] += 1
        for reply in replies:
            assert ProcessingResponse.FromString(reply.SerializeToString()) == reply
        kind = message.WhichOneof("request")
        kinds = [str(reply.WhichOneof("response")) for reply in replies]
        if message.observability_mode or kind is None:
            assert kinds == [], (kind, kinds)
        elif kind not in _REQUEST_KINDS:
            assert kinds == [kind], (kind, kinds)
        elif kinds == ["immediate_response"]:
            self.done["refusals"] += 1
        elif not exchange._duplex_request:
            assert kinds == [kind], (kind, kinds)
        elif kinds:  # held back until now: the headers' reply, the body, the trailers' reply
            places = [_REQUEST_KINDS[found] for found in kinds]
            assert places == sorted(places)
            assert kinds[-1] == kind or kinds == ["request_headers"], (kind, kinds)
            assert kinds.count("request_headers") <= 1
            assert kinds.count("request_trailers") <= 1

    def _close(self, exchange: Exchange) -> None:
        exchange.close(self.now)
        if self.rng.random() < 0.1:
            exchange.close(self.now)

    # --- the fleet -------------------------------------------------------------------------------

    def _settings(self) -> PoolSettings:
        rng = self.rng
        return PoolSettings(
            policy=rng.choice(POLICIES),
            block_tokens=rng.choice((16, 64, 256)),
            cache_tokens=rng.choice((None, 500, 20_000)),
            fallbacks=rng.randint(0, 5),
            learn_speed=rng.random() < 0.5,
            max_pending_prefill_tokens=rng.choice((None, None, 200)),
            shed_after_ms=rng.choice((None, 1.0, 500.0)),
            tenant_header=rng.choice((None, "x-tenant")),
            retry_budget=rng.choice((None, 0.1)),
            client_priority=rng.random() < 0.5,
            reject_if_empty=rng.random() < 0.5,
            content_format=rng.choice(("string", "openai")),
        )

    def _config(self) -> RouterConfig:
        rng = self.rng
        pools = {}
        for name in ("a", "b")[: rng.choice((1, 1, 2))]:
            endpoints = tuple(
                EndpointConfig("10.0.0.1", 8000 + i, f"worker-{i}", rng.choice((1, 3, 120)))
                for i in range(rng.choice((0, 1, 4, 4, 8)))
            )
            pools[name] = PoolConfig(name, endpoints, self.settings)
        steering = rng.choice(
            (Steering(), Steering((), ("x-endpoint",), ()), Steering((), (), ("x-cluster",)))
        )
        return RouterConfig(pools=pools, steering=steering, clusters={name: name for name in pools})

    def _disturb(self) -> None:
        """Something happens to the fleet."""
        rng = self.rng
        self.done["disturbances"] += 1
        if rng.random() < 0.3:
            if rng.random() < 0.3:
                self.settings = replace(self.settings, block_tokens=rng.choice((16, 64, 256)))
            self.router.apply(self._config())
            self.pools.update(self.router.pools.values())
        for pool in self.router.pools.values():
            pool.check(self.now)
            for worker in list(pool.workers):
                match rng.randrange(8):
                    case 0:
                        pool.probed(worker, rng.choice(list(Probe)), self.now - 0.01, self.now)
                    case 1:
                        pool.restarted(worker, self.now)
                    case 2:
                        pool.timed(worker, rng.choice((None, 5.0, 100.0)), rng.choice((None, 0.1, 1e4)))
                    case 3:
                        pool.resize_cache(worker, rng.choice((1, 700, 100_000)))
        path, body = bodies.draw(rng)
        facts = RequestFacts(path=path, headers={"x-tenant": "t"})
        before = [pool.tickets for pool in self.pools]
        self.router.explain(facts, RouteOverrides(), body, self.now)
        assert before == [pool.tickets for pool in self.pools]

    def _expect_nothing(self) -> None:
        for pool in self.pools:
            assert pool.tickets == 0, f"{pool.tickets} open tickets"
            assert not pool._departed, f"departed workers with requests: {pool._departed}"
            assert all(not key.running for key in pool.heat._keys.values()), "prefixes in flight"
            for worker in pool.workers:
                assert worker.in_flight == 0, worker
                assert worker.health.waiting == 0, worker
                assert worker.pending_prefill_tokens(self.now + 1e6) == 0.0, worker


def run(cases: int, seed: int, *, tell: bool = False) -> Counter[str]:
    """So many cases in worlds from ``seed`` on; returns what they were. A failure prints how to repeat it."""
    configure("error")  # what is logged of nonsense is nobody's news
    done: Counter[str] = Counter()
    begun = told = time.monotonic()
    for first in range(0, cases, CASES_PER_WORLD):
        number = seed * 1_000_000 + first // CASES_PER_WORLD
        world = World(number)
        try:
            world.run(min(CASES_PER_WORLD, cases - first))
        except BaseException:
            print(f"repeat with: python tests/fuzz/fuzz.py --world {number}", file=sys.stderr)
            raise
        done += world.done
        if tell and time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{first + CASES_PER_WORLD:>10,} cases, {told - begun:.0f} s", flush=True)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="default %(default)s")
    parser.add_argument("--seed", type=int, help="default: another one each time, which is printed")
    parser.add_argument("--world", type=int, help="repeat this one only")
    args = parser.parse_args(argv)
    if args.world is not None:
        configure("error")
        World(args.world).run(CASES_PER_WORLD)
        return 0
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()
    try:
        done = run(args.cases, seed, tell=True)
    except Exception:
        traceback.print_exc()
        return 1
    print(f"{args.cases:,} cases in {time.monotonic() - begun:.0f} s, nothing found:")
    for what, count in done.most_common():
        print(f"{count:>12,} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
