"""The Envoy YAML as the checks look at it: which routes ask the router, through which filter, to which pool.

A setting may stand in several places, of which one counts: a route's ``ExtProcOverrides`` before its virtual
host's before the filter's own, a route's retry policy before its virtual host's. `Asking` knows the order,
and says at which node the setting is, or would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extproc.doctor.values import count, flag, texts
from extproc.envoyconf import Problem, Resources
from extproc.envoyconf.document import Document, Node
from extproc.envoyconf.pools import is_pool
from extproc.envoyconf.steering import DEFAULT_BUFFER_BYTES, HCM
from extproc.fleet.config import EndpointConfig, PoolConfig, RouterConfig

EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

_FILTER_CONFIG = "envoy.config.route.v3.FilterConfig"
_HEADER_MUTATION = "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"


@dataclass(frozen=True, slots=True)
class Source:
    """What was read. ``fragments``: documents that hold parts of an Envoy configuration in their own form."""

    config: RouterConfig
    resources: Resources
    fragments: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtProc:
    """An ext_proc filter.

    ``name``: of the HTTP filter. ``node``: its ``ExternalProcessor``. ``off``: unless a route turns it on.
    """

    name: str
    node: Node
    off: bool = False


@dataclass(frozen=True, slots=True)
class Manager:
    """An HTTP connection manager, its listener, and its ext_proc filter (None: it has none)."""

    node: Node
    listener: Node
    ext_proc: ExtProc | None
    configs: tuple[Node, ...] = ()

    @property
    def removed_headers(self) -> set[str]:
        """Headers, in lower case, that no client can send: internal, or removed before routes are chosen."""
        removed = {
            name.lower() for config in self.configs for name in texts(config.field("internal_only_headers"))
        }
        for extension in self.node.items("early_header_mutation_extensions"):
            name, body = extension.field("typed_config").unpack()
            if name == _HEADER_MUTATION:
                removed |= {mutation.text("remove").lower() for mutation in body.items("mutations")}
        return removed

    def leads_to(self, cluster: str) -> bool:
        """Whether a route leads to this cluster, or may lead to any."""
        return any(
            mapping.text("cluster") == cluster
            or mapping.text("cluster_header")
            or mapping.text("name") == cluster
            for config in self.configs
            for mapping in config.mappings()
        )


@dataclass(frozen=True, slots=True)
class Asking:
    """A route on which the router is asked. ``overrides``: its ``ExtProcOverrides``, the closest first."""

    route: Node
    virtual_host: Node
    manager: Manager
    ext_proc: ExtProc
    overrides: tuple[Node, ...] = ()

    @property
    def action(self) -> Node:
        """Its ``route`` action."""
        return self.route.field("route")

    def setting(self, name: str) -> Node:
        """The filter's field of that name that counts for this route."""
        for override in self.overrides:
            if (found := override.get(name)) is not None:
                return found
        return self.ext_proc.node.field(name)

    @property
    def retry_policy(self) -> Node:
        """The one that counts; the virtual host's place for it if there is none."""
        return self.action.get("retry_policy") or self.virtual_host.field("retry_policy")

    @property
    def buffer(self) -> Buffer:
        """How much of a body Envoy buffers here."""
        connection = self.manager.listener.field("per_connection_buffer_limit_bytes")
        own = self._own("request_body_buffer_limit")
        return Buffer(own, self._own("per_request_buffer_limit_bytes"), connection)

    def _own(self, name: str) -> Node:
        return self.route.get(name) or self.virtual_host.get(name) or self.route.field(name)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Limits of a request's body, as measured with Envoy 1.40.

    ``own``: ``request_body_buffer_limit``; ``old``: ``per_request_buffer_limit_bytes``; ``connection``: the
    listener's ``per_connection_buffer_limit_bytes``.
    """

    own: Node
    old: Node
    connection: Node

    def accepted_bytes(self, *, heeds_own: bool = True) -> int:
        """Beyond it: 413. Before 1.37 Envoy doesn't heed the route's own limit (``heeds_own``)."""
        own = count(self.own) if heeds_own else None
        return max(self._connection_bytes, own or 0)

    @property
    def retried_bytes(self) -> int:
        """Beyond it: no retry."""
        if (own := count(self.own)) is not None:
            return own
        old = count(self.old)
        return self._connection_bytes if old is None else min(old, self._connection_bytes)

    @property
    def _connection_bytes(self) -> int:
        limit = count(self.connection)
        return DEFAULT_BUFFER_BYTES if limit is None else limit


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that requests of a pool go to. ``own``: endpoints that the router may pick, each once."""

    node: Node
    name: str
    pool: PoolConfig
    own: tuple[EndpointConfig, ...]

    @property
    def options(self) -> Node:
        """Its ``HttpProtocolOptions``."""
        return self.node.field("typed_extension_protocol_options", HTTP_OPTIONS)

    @property
    def max_inflight(self) -> int:
        """Requests that the router may have in flight in this cluster, by its workers' limits."""
        return sum(endpoint.max_inflight for endpoint in self.own)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the YAML tells. ``config.pools`` has DNS names resolved if anything was asked over the network.

    ``pools``: the ``extproc`` objects that a pool's settings stand in, by pool. Without a listener the file
    may be a list of workers for the router alone, on which no Envoy runs.
    """

    config: RouterConfig
    resources: Resources
    managers: tuple[Manager, ...]
    filters: tuple[ExtProc, ...]
    asking: tuple[Asking, ...]
    clusters: tuple[Cluster, ...]
    router_clusters: tuple[Node, ...]
    pools: dict[str, tuple[Node, ...]]

    @property
    def listening(self) -> bool:
        """Whether there is a listener in sight."""
        return bool(self.resources.listeners)

    @property
    def warnings(self) -> list[Problem]:
        """What the router itself warns of."""
        return self.resources.warnings

    def settings(self, name: str) -> Iterator[Node]:
        """The filter's field of that name: every place that counts for some route, each once."""
        nodes = [asking.setting(name) for asking in self.asking]
        nodes += [ext_proc.node.field(name) for ext_proc in self.filters if self.unasked(ext_proc)]
        yield from {(node.document.file, node.path): node for node in nodes}.values()

    def unasked(self, ext_proc: ExtProc) -> bool:
        """Whether no route in sight uses the filter: they come over the network, or it is a fragment."""
        return not any(asking.ext_proc is ext_proc for asking in self.asking)

    def pools_of(self, asking: Asking) -> list[PoolConfig]:
        """The pools that a route's requests may belong to; none if it leads to a cluster of no pool."""
        for override in asking.overrides:
            for entry in override.items("grpc_initial_metadata"):
                if entry.text("key").lower() == "x-extproc-pool":
                    named = self.config.pools.get(entry.text("value"))
                    return [named] if named else []
        cluster = asking.action.text("cluster")
        if not cluster:  # cluster_header, weighted_clusters
            return list(self.config.pools.values())
        pool = self.config.clusters.get(cluster)
        return [self.config.pools[pool]] if pool else []

    @property
    def serving(self) -> list[Asking]:
        """Routes to a pool on which the router is asked; all that ask it, if no pool is in sight."""
        return [a for a in self.asking if not self.config.pools or self.pools_of(a)]

    def pool_field(self, pool: str, name: str) -> Node:
        """Where a pool's setting stands, or would stand."""
        places = self.pools[pool]
        return next((node for place in places if (node := place.get(name))), places[0].field(name))

    def endpoint(self, host: str) -> Node | None:
        """The first endpoint with this host, as the YAML names it."""
        for cluster in self.clusters:
            for assignment in self._assignments(cluster.node):
                for locality in assignment.items("endpoints"):
                    for endpoint in locality.items("lb_endpoints"):
                        address = endpoint.field("endpoint", "address", "socket_address", "address")
                        if isinstance(address.value, str) and address.value.lower() == host:
                            return address
        return None

    def _assignments(self, cluster: Node) -> Iterator[Node]:
        yield cluster.field("load_assignment")
        yield from self.resources.assignments


def read_setup(source: Source) -> Setup:
    """Arrange what was read."""
    config, resources = source.config, source.resources
    managers = tuple(_managers(resources))
    filters = [manager.ext_proc for manager in managers if manager.ext_proc is not None]
    filters += _fragments(source.fragments)
    asking = tuple(asking for manager in managers for asking in _asking(manager))
    names = {
        name
        for ext_proc in filters
        if (name := ext_proc.node.field("grpc_service", "envoy_grpc").text("cluster_name"))
    }
    return Setup(
        config=config,
        resources=resources,
        managers=managers,
        filters=tuple(filters),
        asking=asking,
        clusters=tuple(_clusters(config, resources)),
        router_clusters=tuple(node for node in resources.clusters if node.text("name") in names),
        pools=_pools(config, resources),
    )


def _managers(resources: Resources) -> Iterator[Manager]:
    for listener in resources.listeners:
        for mapping in listener.mappings():
            name, body = mapping.unpack()
            if name == HCM:
                inline = body.get("route_config")
                configs = [inline] if inline is not None else _rds(body, resources)
                yield Manager(body, listener, _ext_proc(body), tuple(configs))


def _rds(manager: Node, resources: Resources) -> list[Node]:
    wanted = manager.text("rds", "route_config_name")
    return [config for config in resources.routes if config.text("name") == wanted]


def _ext_proc(manager: Node) -> ExtProc | None:
    """The manager's ext_proc filter; of several, the first one that asks for bodies."""
    found = []
    for http_filter in manager.items("http_filters"):
        name, body = http_filter.field("typed_config").unpack()
        if name == EXT_PROC:
            off = flag(http_filter.field("disabled"))
            found.append(ExtProc(http_filter.text("name"), body, off))
    for ext_proc in found:
        if ext_proc.node.field("processing_mode").text("request_body_mode") not in ("", "NONE"):
            return ext_proc
    return found[0] if found else None


def _fragments(documents: Sequence[Document]) -> list[ExtProc]:
    """Filters in the patches of Istio's EnvoyFilter."""
    found = []
    for document in documents:
        for mapping in document.node.mappings():
            name, body = mapping.field("typed_config").unpack()
            if name == EXT_PROC:
                found.append(ExtProc(mapping.text("name"), body))
    return found


def _asking(manager: Manager) -> Iterator[Asking]:
    if manager.ext_proc is None:
        return
    for config in manager.configs:
        for virtual_host in config.items("virtual_hosts"):
            for route in virtual_host.items("routes"):
                if route.get("route") is None:
                    continue
                levels = [_per_filter(node, manager.ext_proc.name) for node in (route, virtual_host, config)]
                given = [level for level in levels if level is not None]
                off = flag(given[0].field("disabled")) if given else manager.ext_proc.off
                if not off:
                    overrides = [o for level in given if (o := level.get("overrides")) is not None]
                    yield Asking(route, virtual_host, manager, manager.ext_proc, tuple(overrides))


def _per_filter(node: Node, name: str) -> Node | None:
    """The filter's own configuration at this level; None if there is none."""
    given = node.get("typed_per_filter_config", name)
    if given is None:
        return None
    kind, body = given.unpack()
    if kind == _FILTER_CONFIG and not flag(body.field("disabled")):
        return body.field("config").unpack()[1]
    return body


def _clusters(config: RouterConfig, resources: Resources) -> Iterator[Cluster]:
    seen = set()
    for node in resources.clusters:
        name = node.text("name")
        pool = config.pools.get(config.clusters.get(name, ""))
        if pool is None or name in seen:
            continue
        seen.add(name)
        own = tuple(endpoint for endpoint in pool.endpoints if endpoint.cluster == name or not is_pool(node))
        yield Cluster(node, name, pool, own)


def _pools(config: RouterConfig, resources: Resources) -> dict[str, tuple[Node, ...]]:
    found: dict[str, tuple[Node, ...]] = {}
    for node in resources.clusters:
        pool = config.clusters.get(node.text("name"))
        if pool is not None and is_pool(node):
            found[pool] = (*found.get(pool, ()), node.field("metadata", "filter_metadata").child("extproc"))
    return found
