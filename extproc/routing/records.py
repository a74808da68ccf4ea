"""What one router tells its replicas: decisions and ends, as small records.

A record is applied by address and request, never by position, so it may come late, twice or not at
all: a lost one costs accuracy until the request's own end, never correctness. ``origin`` and ``serial``
name the request across replicas; a record that was applied before changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decided:
    """A request was sent to ``worker`` (its address)."""

    origin: int
    serial: int
    worker: str
    hashes: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Envoy used ``worker`` instead of the one decided."""

    origin: int
    serial: int
    worker: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is over, having generated about ``output_tokens``."""

    origin: int
    serial: int
    output_tokens: float


Record = Decided | Moved | Ended
