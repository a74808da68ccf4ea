"""What Envoy tells of a request besides its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What Envoy's first message tells of a request.

    ``cluster``: Envoy's cluster for the route, "" when unknown (attribute ``xds.cluster_name``).
    ``headers``: those of `extproc.router.Router.wanted_headers` that are there. ``metadata``: the same of
    the stream itself, which are Envoy's own. ``arrived_s``: when that message came, by the monotonic clock.
    """

    request_id: str = ""
    path: str = ""
    content_type: str = ""
    content_encoding: str = ""
    cluster: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    arrived_s: float = 0.0
