"""DNS names as workers: families, changes, outages."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig
from extproc.fleet.dns import Resolver, expand, names, system_lookup


def endpoint(host: str, port: int = 80, family: str = "AUTO", weight: float = 1.0) -> EndpointConfig:
    return EndpointConfig(host, port, "chat", 10, weight, lookup_family=family)


def router_config(*endpoints: EndpointConfig) -> RouterConfig:
    return RouterConfig({"chat": PoolConfig("chat", endpoints)})


def addresses(config: RouterConfig) -> list[str]:
    return [endpoint.address for endpoint in config.pools["chat"].endpoints]


class Records:
    """A table of names that the resolver asks; an exception in it is raised."""

    def __init__(self, **answers: list[str] | Exception):
        self.answers = answers
        self.told: list[list[str]] = []
        self.news = asyncio.Event()
        self.failures: list[tuple[str, str]] = []
        self.resolver = Resolver(
            self.take,
            lambda name, why: self.failures.append((name, why)),
            interval_s=0.01,
            timeout_s=0.05,
            lookup=self.lookup,
        )

    def take(self, config: RouterConfig) -> None:
        self.told.append(addresses(config))
        self.news.set()

    async def lookup(self, name: str) -> list[str]:
        answer = self.answers[name]
        if isinstance(answer, TimeoutError):
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_every_address_is_a_worker_with_the_endpoints_settings():
    records = Records(vllm=["10.0.0.2", "10.0.0.1", "10.0.0.2"])
    config = router_config(endpoint("vllm", 8000, weight=2.0), endpoint("10.0.0.9"))
    await records.resolver.use(config)
    assert records.told == [["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:80"]]
    assert [e.weight for e in expand(config, {"vllm": ("10.0.0.1",)}).pools["chat"].endpoints] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("AUTO", ["[fd00::1]:80"]),
        ("V4_ONLY", ["10.0.0.1:80"]),
        ("V6_ONLY", ["[fd00::1]:80"]),
        ("V4_PREFERRED", ["10.0.0.1:80"]),
        ("ALL", ["10.0.0.1:80", "[fd00::1]:80"]),
        ("NEWER", ["[fd00::1]:80"]),
    ],
)
def test_lookup_families(family, expected):
    config = router_config(endpoint("vllm", family=family))
    assert addresses(expand(config, {"vllm": ("10.0.0.1", "fd00::1")})) == expected


@pytest.mark.parametrize(("family", "expected"), [("AUTO", ["10.0.0.1:80"]), ("V6_ONLY", [])])
def test_only_ipv4(family, expected):
    config = router_config(endpoint("vllm", family=family))
    assert addresses(expand(config, {"vllm": ("10.0.0.1",)})) == expected


def test_an_address_counts_once():
    config = router_config(endpoint("10.0.0.1", weight=3.0), endpoint("a"), endpoint("b"))
    answers = {"a": ("10.0.0.1", "10.0.0.2"), "b": ("10.0.0.2",)}
    resolved = expand(config, answers)
    assert addresses(resolved) == ["10.0.0.1:80", "10.0.0.2:80"]
    assert resolved.pools["chat"].endpoints[0].weight == 3.0


def test_without_names_nothing_changes():
    config = router_config(endpoint("10.0.0.1"), endpoint("fd00::1"))
    assert names(config) == set()
    assert expand(config, {}) is config


async def test_an_outage_keeps_the_last_answer_and_is_told_once():
    records = Records(vllm=["10.0.0.1"])
    await records.resolver.use(router_config(endpoint("vllm")))
    for outage in (socket.gaierror(-2, "Name or service not known"), TimeoutError(), []):
        records.answers["vllm"] = outage
        await records.resolver.refresh()
    assert records.told == [["10.0.0.1:80"]]
    assert records.failures == [("vllm", "[Errno -2] Name or service not known")]
    records.answers["vllm"] = ["10.0.0.3"]
    await records.resolver.refresh()
    records.answers["vllm"] = TimeoutError()
    await records.resolver.refresh()
    assert records.told == [["10.0.0.1:80"], ["10.0.0.3:80"]]
    assert records.failures[1:] == [("vllm", "no answer within 0.05 s")]


async def test_one_bad_name_does_not_hold_up_the_others():
    records = Records(good=["10.0.0.1"], slow=TimeoutError(), bad=ValueError("embedded null character"))
    await records.resolver.use(router_config(endpoint("slow"), endpoint("bad"), endpoint("good")))
    assert records.told == [["10.0.0.1:80"]]
    assert {name for name, _ in records.failures} == {"slow", "bad"}


async def test_a_name_that_left_the_configuration_is_forgotten():
    records = Records(a=["10.0.0.1"], b=["10.0.0.2"])
    await records.resolver.use(router_config(endpoint("a")))
    await records.resolver.use(router_config(endpoint("b")))
    records.answers["a"] = TimeoutError()
    await records.resolver.use(router_config(endpoint("a"), endpoint("b")))
    assert records.told == [["10.0.0.1:80"], ["10.0.0.2:80"]]
    assert [name for name, _ in records.failures] == ["a"]


async def test_changes_are_followed():
    records = Records(vllm=["10.0.0.1"])
    await records.resolver.use(router_config(endpoint("vllm")))
    records.news.clear()
    task = asyncio.create_task(records.resolver.run())
    records.answers["vllm"] = ["10.0.0.1", "10.0.0.2"]
    async with asyncio.timeout(30):
        await records.news.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert records.told[1] == ["10.0.0.1:80", "10.0.0.2:80"]


async def test_the_systems_own_resolver():
    assert "127.0.0.1" in await system_lookup("localhost")
    with pytest.raises((OSError, ValueError)):
        await system_lookup("no-such-name.invalid")
