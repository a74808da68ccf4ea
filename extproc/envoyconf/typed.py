"""The fields we read of Envoy's messages, cut out of plain data and made into ``envoy_data_plane`` messages.

``envoy_data_plane`` refuses what it doesn't know (types, enum values, fields newer than itself) and doesn't
say where. So the data is first cut down to a shape of ours: other fields fall away, unknown enum values count
as unset, and a value of the wrong kind is a problem with its place. The package is imported when first used
(about half a second).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.envoyconf.document import Node
from extproc.envoyconf.problems import Problem

#: Field name to its shape: a mapping (message), a one-element list (repeated), a type, or enum value names.
Shape = Mapping[str, Any]

_HEALTH = ("UNKNOWN", "HEALTHY", "UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED")

_ASSIGNMENT: Shape = {
    "cluster_name": str,
    "endpoints": [
        {
            "priority": int,
            "lb_endpoints": [
                {
                    "health_status": _HEALTH,
                    "load_balancing_weight": int,
                    "endpoint": {"address": {"socket_address": {"address": str, "port_value": int}}},
                }
            ],
        }
    ],
}
_CLUSTER: Shape = {"name": str, "load_assignment": _ASSIGNMENT}
_OVERRIDE_HOST: Shape = {
    "override_host_sources": [{"header": str, "metadata": {"key": str, "path": [{"key": str}]}}]
}


def read_cluster(node: Node, problems: list[Problem]) -> tuple[Any, Node | None]:
    """A ``Cluster`` (name, load_assignment) or None, and the assignment's node."""
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster

    return _message(Cluster, _CLUSTER, node, problems), node.get("load_assignment")


def read_assignment(node: Node, problems: list[Problem]) -> Any:
    """A ``ClusterLoadAssignment``, or None if it is bad."""
    from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment

    return _message(ClusterLoadAssignment, _ASSIGNMENT, node, problems)


def read_override_host(node: Node, problems: list[Problem]) -> Any:
    """An ``OverrideHost`` load balancing policy (its sources), or None if it is bad."""
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost

    return _message(OverrideHost, _OVERRIDE_HOST, node, problems)


def _message(kind: Any, shape: Shape, node: Node, problems: list[Problem]) -> Any:
    before = len(problems)
    data = _cut(shape, node, problems)
    if len(problems) > before:
        return None
    return kind.from_dict(data)


def _cut(shape: Any, node: Node, problems: list[Problem]) -> Any:
    """``node`` cut down to ``shape``; None with a problem noted if it is of the wrong kind."""
    value = node.value
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return _wrong("is not an object", node, problems)
        fields = {name: child for name in shape if (child := node.get(name)) is not None}
        cut = {name: _cut(shape[name], child, problems) for name, child in fields.items()}
        return {name: part for name, part in cut.items() if part is not None}
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _wrong("is not a list", node, problems)
        return [_cut(shape[0], item, problems) for item in node.items()]
    if isinstance(shape, tuple):
        if isinstance(value, int) and not isinstance(value, bool):
            return shape[value] if 0 <= value < len(shape) else None
        return value if value in shape else None
    if shape is int:
        return _uint32(node, problems)
    if isinstance(value, str):
        return value
    return _wrong("is not a string", node, problems)


def _uint32(node: Node, problems: list[Problem]) -> int | None:
    value = node.value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        _wrong("is not a whole number from 0 to 4294967295", node, problems)
        return None
    return value


def _wrong(message: str, node: Node, problems: list[Problem]) -> None:
    problems.append(
        node.problem(message, "write it as Envoy's documentation of the field says", value=node.value)
    )
