"""What a registry counts."""

from __future__ import annotations

from prometheus_client.registry import Collector


def total(registry: Collector, name: str, **labels: str) -> float:
    """Sum of the samples of that name that have these labels, whatever others they have.

    A name that isn't exported, or a label that its samples don't have, is an error: it would count 0 forever.
    """
    families = [
        metric for metric in registry.collect() if name.removesuffix("_total").startswith(metric.name)
    ]
    assert families, f"no metric {name}"
    samples = [sample for metric in families for sample in metric.samples if sample.name == name]
    for sample in samples:
        assert labels.keys() <= sample.labels.keys(), f"{name} has {set(sample.labels)}, not {set(labels)}"
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
