"""Workers behind DNS names: each address that a name has is a worker of its own.

Envoy resolves the endpoints of STRICT_DNS and LOGICAL_DNS clusters and knows them by address; so must the
picks. A name is asked again every few seconds (Envoy's ``dns_refresh_rate`` is 5 s). The last good answer
counts until there is a better one, so a DNS outage changes nothing.

Which addresses Envoy takes depends on the cluster's ``dns_lookup_family``: AUTO means the IPv6 ones, or the
IPv4 ones if there are none.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig

#: From a name to its IP addresses, in text; OSError: no answer, ValueError: not a name.
Lookup = Callable[[str], Awaitable[list[str]]]

#: Name to addresses, sorted.
Answers = Mapping[str, tuple[str, ...]]


class Resolver:
    """Keeps a configuration's DNS names resolved.

    ``on_config`` gets the resolved configuration whenever it changed, ``on_failure`` a name and what went
    wrong, once until the name answers again.
    """

    def __init__(
        self,
        on_config: Callable[[RouterConfig], None],
        on_failure: Callable[[str, str], None],
        *,
        interval_s: float = 5.0,
        timeout_s: float = 5.0,
        lookup: Lookup | None = None,
    ):
        self._on_config = on_config
        self._on_failure = on_failure
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._lookup = lookup or system_lookup
        self._config: RouterConfig | None = None
        self._told: RouterConfig | None = None
        self._answers: dict[str, tuple[str, ...]] = {}
        self._failing: set[str] = set()
        self._lock = asyncio.Lock()

    async def use(self, config: RouterConfig) -> None:
        """Take over a new configuration: resolve its names once and tell the outcome."""
        self._config = config
        await self.refresh()

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Ask for every name once, all at the same time, and tell the outcome if it is news."""
        async with self._lock:
            config = self._config
            if config is None:
                return
            wanted = names(config)
            await asyncio.gather(*(self._ask(name) for name in wanted))
            for gone in self._answers.keys() - wanted:
                del self._answers[gone]
            self._failing &= wanted
            resolved = expand(config, self._answers)
            if config is self._config and resolved != self._told:
                self._told = resolved
                self._on_config(resolved)

    async def _ask(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                addresses = await self._lookup(name)
        except TimeoutError:
            self._fail(name, f"no answer within {self._timeout_s:g} s")
        except (OSError, ValueError) as error:
            self._fail(name, str(error))
        else:
            if addresses:
                self._answers[name] = tuple(sorted(set(addresses)))
                self._failing.discard(name)
            else:
                self._fail(name, "has no address")

    def _fail(self, name: str, why: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            self._on_failure(name, why)


async def system_lookup(name: str) -> list[str]:
    """All A and AAAA records, as the system resolves them (``/etc/hosts`` included)."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


def is_name(endpoint: EndpointConfig) -> bool:
    """Whether the endpoint's host is a DNS name rather than an IP address."""
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return True
    return False


def names(config: RouterConfig) -> set[str]:
    """The DNS names among the endpoints of all pools."""
    return {
        endpoint.host for pool in config.pools.values() for endpoint in pool.endpoints if is_name(endpoint)
    }


def expand(config: RouterConfig, answers: Answers) -> RouterConfig:
    """The configuration with each name replaced by its addresses; a name without an answer has none.

    An address that a pool has already counts once.
    """
    if not names(config):
        return config
    return replace(config, pools={name: _expand(pool, answers) for name, pool in config.pools.items()})


def _expand(pool: PoolConfig, answers: Answers) -> PoolConfig:
    endpoints: dict[str, EndpointConfig] = {}
    for endpoint in pool.endpoints:
        hosts = (
            _of_family(answers.get(endpoint.host, ()), endpoint.lookup_family)
            if is_name(endpoint)
            else (endpoint.host,)
        )
        for host in hosts:
            worker = replace(endpoint, host=host)
            endpoints.setdefault(worker.address, worker)
    return replace(pool, endpoints=tuple(endpoints.values()))


def _of_family(addresses: tuple[str, ...], family: str) -> tuple[str, ...]:
    v6 = tuple(address for address in addresses if ":" in address)
    v4 = tuple(address for address in addresses if ":" not in address)
    match family:
        case "V4_ONLY":
            return v4
        case "V6_ONLY":
            return v6
        case "V4_PREFERRED":
            return v4 or v6
        case "ALL":
            return addresses
    return v6 or v4
