"""Families of metrics: numbers that are cheap to write while a request waits, and quick to print.

`prometheus_client` takes a lock and looks at its labels at each write, and makes an object of each sample at
each scrape; a page for 128 workers has some 4,000 of them. So here a counter is an entry of a dict, and a
page is written row by row (`extproc.observe.page`). Registry, content types and the process's own metrics are
the library's, which these families are collectors for: `docs/performance.md` has the figures.

One thread writes, the event loop's; a scrape reads in another one. It sees each number whole, some of them
newer than others.

Every family says how several routers' values are put together (``merge``). Buckets are fixed, so that
histograms add up, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]

#: How the values of several routers in front of the same workers become one; of counters, their rates.
#: "max" also of what each of them reads from the same engine. "any": all say the same, or nearly.
Merge = Literal["sum", "max", "min", "any"]

#: A sample: what its name has behind the family's, the labels' values, the value.
Row = tuple[str, Labels, float]

#: The label sets that a family shows from the beginning, before anything is known of them.
Starts = Callable[[], Iterable[Labels]]


def _no_starts() -> Iterable[Labels]:
    return ()


class Family(Collector):
    """One family. ``name`` has its unit and, of a counter, no ``_total``; ``text`` says what it means."""

    kind: Literal["counter", "gauge", "histogram", "summary"]

    def __init__(self, name: str, text: str, labels: Labels, merge: Merge) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.merge = merge

    @property
    def full_name(self) -> str:
        """As users write it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        """By Prometheus' rules it is the end of the name; "" for a plain count."""
        return next((unit for ending, unit in _UNITS.items() if self.name.endswith(ending)), "")

    @property
    def row(self) -> str:
        """Its row in docs/metrics.md."""
        labels = ", ".join(f"`{label}`" for label in self.labels) or "–"
        cells = (f"`{self.full_name}`", self.kind, self.unit or "–", labels, self.merge, self.text)
        return f"| {' | '.join(cells)} |"

    def rows(self) -> list[Row]:
        """All that is known now."""
        raise NotImplementedError

    def prune(self, keep: Callable[[Labels], bool]) -> None:
        """Forget the label sets that ``keep`` doesn't want, if any are remembered. In the writing thread."""

    def describe(self) -> Iterable[Metric]:
        """What `collect` will be called like; the registry asks."""
        return [Metric(self.name, self.text, self.kind)]

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        return [Table(self)]


class Counter(Family):
    """Grows."""

    kind = "counter"

    def __init__(
        self, name: str, text: str, labels: Labels = (), merge: Merge = "sum", starts: Starts = _no_starts
    ) -> None:
        super().__init__(name, text, labels, merge)
        self._starts = starts
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, labels: Labels = (), amount: float = 1.0) -> None:
        """So much more."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def rows(self) -> list[Row]:
        """One row for each label set."""
        found = self._values.copy()
        for labels in self._starts():
            found.setdefault(labels, 0.0)
        return [("_total", labels, value) for labels, value in found.items()]

    def prune(self, keep: Callable[[Labels], bool]) -> None:
        """See `Family.prune`."""
        for labels in [labels for labels in self._values if not keep(labels)]:
            del self._values[labels]


class Gauge(Family):
    """Read when a scrape asks, so that it can't disagree with what it is read from."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels,
        merge: Merge,
        read: Callable[[], Iterable[tuple[Labels, float]]],
    ) -> None:
        super().__init__(name, text, labels, merge)
        self._read = read

    def rows(self) -> list[Row]:
        """What is read now."""
        return [("", labels, float(value)) for labels, value in self._read()]


class Histogram(Family):
    """Counts observations by size."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels,
        bounds: Sequence[float],
        merge: Merge = "sum",
        starts: Starts = _no_starts,
    ) -> None:
        """``bounds``: the buckets' largest values, rising, without the last, which is infinite."""
        super().__init__(name, text, labels, merge)
        self.bounds = tuple(bounds)
        self._starts = starts
        self._signed = self.bounds[0] < 0  # then, says OpenMetrics, without sum and count: a sum may not fall
        self._les = [floatToGoString(bound) for bound in (*self.bounds, inf)]  # type: ignore[no-untyped-call]
        self._cells: dict[Labels, list[float]] = {}  # each bucket's own count, then the sum

    def observe(self, labels: Labels, value: float) -> None:
        """One more."""
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = self._empty()
        cell[bisect_left(self.bounds, value)] += 1.0
        cell[-1] += value

    def take_over(self, labels: Labels, counts: Mapping[float, float], total: float) -> None:
        """Observations that somebody else counted: how many by bucket, and their sum.

        ``counts``: the bucket's upper bound to the number in that bucket alone. One whose bound isn't ours
        goes to our next larger bucket.
        """
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = self._empty()
        for bound, count in counts.items():
            cell[bisect_left(self.bounds, bound)] += count
        cell[-1] += total

    def _empty(self) -> list[float]:
        return [0.0] * (len(self.bounds) + 2)

    def rows(self) -> list[Row]:
        """Cumulative buckets, count and sum for each label set; of differences, buckets alone."""
        found = {labels: cell.copy() for labels, cell in self._cells.copy().items()}
        for labels in self._starts():
            found.setdefault(labels, self._empty())
        rows: list[Row] = []
        for labels, cell in found.items():
            count = 0.0
            for le, own in zip(self._les, cell, strict=False):
                count += own
                rows.append(("_bucket", (*labels, le), count))
            if not self._signed:
                rows += (("_count", labels, count), ("_sum", labels, cell[-1]))
        return rows

    def prune(self, keep: Callable[[Labels], bool]) -> None:
        """See `Family.prune`."""
        for labels in [labels for labels in self._cells if not keep(labels)]:
            del self._cells[labels]


class Summary(Family):
    """Counts observations and adds them up; their quotient is a mean."""

    kind = "summary"

    def __init__(
        self, name: str, text: str, labels: Labels, merge: Merge = "sum", starts: Starts = _no_starts
    ) -> None:
        super().__init__(name, text, labels, merge)
        self._starts = starts
        self._sums: dict[Labels, tuple[float, float]] = {}

    def take_over(self, labels: Labels, count: float, total: float) -> None:
        """So many observations that somebody else counted, and their sum."""
        before = self._sums.get(labels, (0.0, 0.0))
        self._sums[labels] = (before[0] + count, before[1] + total)

    def rows(self) -> list[Row]:
        """Count and sum for each label set."""
        found = self._sums.copy()
        for labels in self._starts():
            found.setdefault(labels, (0.0, 0.0))
        return [
            row
            for labels, (count, total) in found.items()
            for row in (("_count", labels, count), ("_sum", labels, total))
        ]

    def prune(self, keep: Callable[[Labels], bool]) -> None:
        """See `Family.prune`."""
        for labels in [labels for labels in self._sums if not keep(labels)]:
            del self._sums[labels]


class Table(Metric):
    """A family at one moment. `extproc.observe.page` prints its rows; others may ask for samples."""

    def __init__(self, family: Family) -> None:
        super().__init__(family.name, family.text, family.kind)
        self.labels = family.labels
        self.rows = family.rows()

    @property
    def samples(self) -> list[Sample]:
        """The rows as the library has them. Slow: for tests, and for who asks for single names."""
        return [
            Sample(self.name + suffix, dict(zip((*self.labels, "le"), values, strict=False)), value)
            for suffix, values, value in self.rows
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The base class sets it to nothing."""


def register(registry: CollectorRegistry, families: Iterable[Family]) -> None:
    """Show them."""
    for family in families:
        registry.register(family)


_UNITS = {
    "_tokens_per_second": "tokens/s",
    "_seconds": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_ratio": "0 to 1",
}
