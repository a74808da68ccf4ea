"""Kubernetes manifests, as far as Envoy's own configuration stands in them.

A ConfigMap may hold the file that tells the router its pools; an Istio EnvoyFilter holds the ext_proc filter
among its patches. What istiod makes of other resources (routes, timeouts, retries) is not seen here.
"""

from __future__ import annotations

from pathlib import Path

from extproc.doctor.setup import Source
from extproc.envoyconf import ConfigError, Problem, Resources, arrange, survey
from extproc.envoyconf.document import Document, read_all, read_inside

#: Keys of which an Envoy configuration has at least one.
_ENVOY_KEYS = ("static_resources", "dynamic_resources", "resources")


def read(path: Path) -> Source:
    """An Envoy configuration, a file of manifests, or a folder of such files. Raises ConfigError."""
    files = sorted(map(str, path.glob("*.yaml"))) if path.is_dir() else [str(path)]
    documents = [document for file in files for document in read_all(file)]
    if not path.is_dir() and not any(map(_is_manifest, documents)):
        return _checked(Source(*survey(path)))
    resources = Resources(source=str(path))
    fragments = []
    for document in documents:
        if not _is_manifest(document):
            continue
        fragments.append(document)
        for name in document.node.field("data").value or {} if document.data["kind"] == "ConfigMap" else ():
            text = document.node.field("data").child(name)
            if not isinstance(text.value, str):
                continue
            for inner in read_inside(text):
                if isinstance(inner.data, dict) and any(key in inner.data for key in _ENVOY_KEYS):
                    resources.add(inner)
    config = arrange(resources)
    if not resources.clusters:
        resources.warnings.clear()  # no cluster is marked as a pool because there is none
    return _checked(Source(config, resources, tuple(fragments)))


def _is_manifest(document: Document) -> bool:
    return isinstance(document.data, dict) and {"apiVersion", "kind"} <= document.data.keys()


def _checked(source: Source) -> Source:
    """Raises ConfigError if there is nothing to judge."""
    resources = source.resources
    if not (resources.clusters or resources.listeners or resources.routes or source.fragments):
        problem = Problem(
            resources.source,
            "",
            None,
            "has no clusters, listeners or routes",
            "give the Envoy bootstrap (static_resources: ...) or xDS resources (resources: [...])",
        )
        raise ConfigError([problem], tuple(resources.files))
    return source
