"""Who is told what happens: metrics, log records, and whoever else wants to know.

A sink is an object whose `Sink.handlers` name the events that it wants; a decision costs nothing for sinks
that don't look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from extproc.observe.events import Event
from extproc.observe.metrics import Metrics
from extproc.observe.records import Records
from extproc.routing.pool import Pool

#: An event's class, and what takes such events.
Handlers = Mapping[type, Callable[[Any], None]]


class Sink(Protocol):
    """Something that is told of events."""

    @property
    def handlers(self) -> Handlers:
        """What it wants to be told, and by which function. Asked once."""
        ...


class Observer:
    """Hands on events. One for each server process."""

    def __init__(self) -> None:
        self._handlers: dict[type, list[Callable[[Any], None]]] = {}
        #: Of requests and of their streams, what sinks want to find in `RequestFacts`.
        self.wanted_headers: frozenset[str] = frozenset()
        self.metrics = Metrics()
        self.add(self.metrics)
        self.add(Records())

    @property
    def registry(self) -> CollectorRegistry:
        """What ``/metrics`` shows."""
        return self.metrics.registry

    def add(self, sink: Sink, wanted_headers: frozenset[str] = frozenset()) -> None:
        """Tell it, too, from now on; after those before it. Before any request, if it wants headers."""
        self.wanted_headers |= wanted_headers
        for kind, handler in sink.handlers.items():
            self._handlers.setdefault(kind, []).append(handler)

    def tell(self, event: Event) -> None:
        """Something happened."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    def watch(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        """Export gauges of these pools from now on."""
        self.metrics.watch(pools)
