"""From one file to all the xDS resources that it holds or points to.

A bootstrap holds clusters and listeners under ``static_resources``; ``dynamic_resources`` may point to
files of more (``path_config_source``), which hold a DiscoveryResponse: ``resources:``, a list of ``Any``.
Such a file is understood as the first one, too. Resources that come over gRPC are out of reach here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from extproc.envoyconf.document import Document, Node, read
from extproc.envoyconf.problems import ConfigError, Problem

CLUSTER = "envoy.config.cluster.v3.Cluster"
ASSIGNMENT = "envoy.config.endpoint.v3.ClusterLoadAssignment"
LISTENER = "envoy.config.listener.v3.Listener"
ROUTES = "envoy.config.route.v3.RouteConfiguration"
_WRAPPER = "envoy.service.discovery.v3.Resource"


@dataclass(slots=True)
class Resources:
    """What was found, and every file that was read, in order; ``source`` is the first."""

    source: str
    clusters: list[Node] = field(default_factory=list)
    listeners: list[Node] = field(default_factory=list)
    routes: list[Node] = field(default_factory=list)
    assignments: list[Node] = field(default_factory=list)
    files: dict[str, Document | None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def follow(self, source: Node | None, *, needed: bool) -> bool:
        """Read the file that a ``ConfigSource`` names; False if it names none.

        A file that isn't there is a problem when ``needed``, a warning when not.
        """
        if source is None:
            return False
        path = source.get("path_config_source", "path") or source.get("path")
        if path is None or not isinstance(path.value, str):
            return False
        file = self._find(path.value)
        if file in self.files:
            return True
        if not os.path.exists(file):
            self.files[file] = None
            problem = path.problem(
                "doesn't exist",
                "make the file readable for the router, under the same path",
                value=path.value,
            )
            if needed:
                self.problems.append(problem)
            else:
                self.warnings.append(problem)
            return True
        self.open(file)
        return True

    def open(self, file: str) -> None:
        """Read a file and add its resources; problems are collected."""
        self.files[file] = None
        try:
            document = read(file)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return
        self.add(document)

    def add(self, document: Document) -> None:
        """Add a document's resources; problems are collected."""
        self.files[document.file] = document
        root = document.node
        if not isinstance(root.value, dict):
            self.problems.append(
                root.problem(
                    "is not an Envoy configuration",
                    "a bootstrap (static_resources: ...) or xDS resources (resources: [...]) is expected",
                    value=root.value,
                )
            )
            return
        for item in root.items("resources"):
            self._add(item)
        self.clusters.extend(root.items("static_resources", "clusters"))
        self.listeners.extend(root.items("static_resources", "listeners"))
        self.follow(root.get("dynamic_resources", "cds_config"), needed=True)
        self.follow(root.get("dynamic_resources", "lds_config"), needed=False)

    def _add(self, item: Node) -> None:
        name, body = item.unpack()
        if name == _WRAPPER or (not name and item.get("resource")):
            inner = item.get("resource")
            if inner is None:
                return
            name, body = inner.unpack()
        kinds = {
            CLUSTER: self.clusters,
            ASSIGNMENT: self.assignments,
            LISTENER: self.listeners,
            ROUTES: self.routes,
        }
        if name in kinds:
            kinds[name].append(body)

    def _find(self, path: str) -> str:
        """Relative paths count from the working directory, as for Envoy, else from the first file's."""
        first = next(iter(self.files), "")
        beside = Path(first).parent / path
        if os.path.isabs(path) or os.path.exists(path) or not os.path.exists(beside):
            return path
        return str(beside)
