"""The Envoy configuration as the router's own: YAML, JSON and xDS files in, a `RouterConfig` out.

Read the same file as Envoy. A cluster is a pool of workers when its ``metadata.filter_metadata`` has the key
``extproc``; see docs/configuration.md for what that object may hold. What isn't ours is never a reason to
refuse: unknown fields, types and extensions pass by unread.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from extproc.envoyconf.pools import read_pools
from extproc.envoyconf.problems import ConfigError, Problem
from extproc.envoyconf.resources import Resources
from extproc.envoyconf.steering import read_max_body_bytes, read_steering
from extproc.fleet.config import RouterConfig

__all__ = ["ConfigError", "Problem", "Resources", "arrange", "load", "survey"]


def load(path: str | Path) -> RouterConfig:
    """Read an Envoy bootstrap or xDS file and the files that it points to.

    Raises ConfigError with every problem that was found and the files that were read so far.
    ``RouterConfig.files`` are the files to watch.
    """
    return survey(path)[0]


def survey(path: str | Path) -> tuple[RouterConfig, Resources]:
    """As `load`, and the resources that it was read from."""
    resources = Resources(source=str(path))
    resources.open(str(path))
    return arrange(resources), resources


def arrange(resources: Resources) -> RouterConfig:
    """The router's configuration, of resources that were read. Raises ConfigError with all problems."""
    path = resources.source
    pools, clusters = read_pools(resources)
    steering = read_steering(resources)
    max_body_bytes = read_max_body_bytes(resources)
    files = tuple(resources.files)
    if resources.problems:
        raise ConfigError(resources.problems, files)
    if not pools:
        resources.warnings.append(
            Problem(
                path,
                "",
                None,
                "no cluster has the key extproc in metadata.filter_metadata, so nothing is routed",
                "add it to the cluster of your workers: metadata: {filter_metadata: {extproc: {}}}",
            )
        )
    config = RouterConfig(
        pools=pools,
        steering=steering,
        source=path,
        clusters=clusters,
        files=files,
        warnings=tuple(str(warning) for warning in resources.warnings),
    )
    return config if max_body_bytes is None else replace(config, max_body_bytes=max_body_bytes)
