"""Bad configuration: each error names file, line, place, value and fix; nothing else is ever raised."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from extproc.envoyconf import ConfigError, load
from extproc.fleet.settings import POOL_SETTINGS

GOOD = """static_resources:
  clusters:
  - name: chat
    metadata:
      filter_metadata:
        extproc:
          max_inflight: 60
    load_assignment:
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 10.0.0.1, port_value: 8000}}}
          metadata: {filter_metadata: {extproc: {weight: 2}}}
"""
SETTINGS = "static_resources.clusters[0].metadata.filter_metadata.extproc"
ENDPOINT = "static_resources.clusters[0].load_assignment.endpoints[0].lb_endpoints[0]"


def errors(tmp_path: Path, text: str, name: str = "envoy.yaml") -> list[str]:
    """The problems of a file, with its directory taken off."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name)
    assert caught.value.files[0] == str(tmp_path / name)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_the_base_is_good(tmp_path):
    (tmp_path / "envoy.yaml").write_text(GOOD)
    assert load(tmp_path / "envoy.yaml").warnings == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "max_inflight: 60",
            "max_inflght: 60",
            f"envoy.yaml:7: {SETTINGS}.max_inflght: 60 unknown key in a pool's settings;"
            " did you mean max_inflight?",
        ),
        (
            "max_inflight: 60",
            "maxInflight: 60",
            f"envoy.yaml:7: {SETTINGS}.maxInflight: 60 unknown key in a pool's settings;"
            " did you mean max_inflight?",
        ),
        (
            "max_inflight: 60",
            "policy: fastest",
            f"envoy.yaml:7: {SETTINGS}.policy: 'fastest' is none of the known values;"
            " use one of prefix-hash, predicted, lmetric, least-request, round-robin, random",
        ),
        (
            "max_inflight: 60",
            "max_inflight: 0",
            f"envoy.yaml:7: {SETTINGS}.max_inflight: 0 is too small;"
            " use a whole number (requests) from 1 to 1000000; the default is 120",
        ),
        (
            "max_inflight: 60",
            "pool: on",
            f"envoy.yaml:7: {SETTINGS}.pool: True must be a non-empty string; give a name in quotes",
        ),
        (
            "max_inflight: 60",
            '"a key.": 60',
            f'envoy.yaml:7: {SETTINGS}["a key."]: 60 unknown key in a pool\'s settings; remove it;'
            f" known keys: {', '.join(setting.name for setting in POOL_SETTINGS)}",
        ),
        (
            "extproc:\n          max_inflight: 60",
            "extproc: true",
            f"envoy.yaml:6: {SETTINGS}: True is not an object; write {{}} for a pool with default settings",
        ),
        (
            "{weight: 2}",
            "{wieght: 2}",
            f"envoy.yaml:12: {ENDPOINT}.metadata.filter_metadata.extproc.wieght: 2"
            " unknown key in a worker's settings; did you mean weight?",
        ),
        (
            "{weight: 2}",
            "{weight: .inf}",
            f"envoy.yaml:12: {ENDPOINT}.metadata.filter_metadata.extproc.weight: '.inf' must be a number;"
            " use a number from 0.01 to 1000; the default is 1",
        ),
        (
            "{weight: 2}",
            "heavy",
            f"envoy.yaml:12: {ENDPOINT}.metadata.filter_metadata.extproc: 'heavy' is not an object;"
            " write the worker's settings as keys",
        ),
        (
            "port_value: 8000",
            "port_value: http",
            f"envoy.yaml:11: {ENDPOINT}.endpoint.address.socket_address.port_value: 'http'"
            " is not a whole number from 0 to 4294967295;"
            " write it as Envoy's documentation of the field says",
        ),
        (
            "- lb_endpoints:\n        - endpoint",
            "- lb_endpoints:\n          endpoint",
            "envoy.yaml:10: static_resources.clusters[0].load_assignment.endpoints[0].lb_endpoints:"
            " {'endpoint': {'address': {...}}, 'metadata': {'filter_metadata': {...}}} is not a list;"
            " write it as Envoy's documentation of the field says",
        ),
        (
            "name: chat",
            "alt_stat_name: chat",
            "envoy.yaml:3: static_resources.clusters[0]: is a pool without a name; give the cluster a name",
        ),
        (GOOD, "", "envoy.yaml: is empty; put an Envoy bootstrap or a list of xDS resources into it"),
        (
            GOOD,
            "- a\n",
            "envoy.yaml:1: ['a'] is not an Envoy configuration; a bootstrap (static_resources: ...)"
            " or xDS resources (resources: [...]) is expected",
        ),
        (GOOD, "a: b: c\n", "envoy.yaml:1: is not YAML: mapping values are not allowed in this context"),
        (GOOD, "a: &x [*x]\n", "envoy.yaml:1: has an anchor that contains itself"),
        (GOOD, "a: 1\n? [b]\n: c\n", "envoy.yaml:2: has a key that is not a scalar"),
        (GOOD, "a: \x07", "envoy.yaml: is not YAML: control characters are not allowed"),
        (GOOD, "[" * 5000, "envoy.yaml:1: is not YAML: exceeded maximum nesting depth"),
        (GOOD, "[" * 900 + "]" * 900, "envoy.yaml: is nested too deeply"),
    ],
)
def test_messages(tmp_path, old, new, message):
    assert old in GOOD
    assert errors(tmp_path, GOOD.replace(old, new)) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', "envoy.json:2: is not JSON: Expecting value"),
        ("[" * 100_000, "envoy.json: is nested too deeply"),
        (
            '{"resources": 1, "static_resources": {"clusters": [{"name": "c", "metadata":'
            ' {"filter_metadata": {"extproc": {"alpha": 1e999}}}}]}}',
            "envoy.json: static_resources.clusters[0].metadata.filter_metadata.extproc.alpha:"
            " inf must be a finite number; use a number from 0 to 1000; the default is 1",
        ),
    ],
)
def test_json_messages(tmp_path, text, message):
    assert errors(tmp_path, text, "envoy.json") == [message]


def test_all_problems_at_once(tmp_path):
    text = GOOD.replace("max_inflight: 60", "max_inflight: no").replace("weight: 2", "weight: 0")
    assert [line.partition(": ")[0] for line in errors(tmp_path, text)] == ["envoy.yaml:7", "envoy.yaml:12"]


def test_contradicting_clusters_of_a_pool(tmp_path):
    def one(name: str, limit: int) -> str:
        return (
            f"  - {{name: {name}, metadata: {{filter_metadata: {{extproc:"
            f" {{pool: chat, max_inflight: {limit}}}}}}}}}\n"
        )

    text = "static_resources:\n  clusters:\n" + one("a", 1) + one("b", 1) + one("c", 2)
    assert errors(tmp_path, text) == [
        "envoy.yaml:5: static_resources.clusters[2].metadata.filter_metadata.extproc.max_inflight: 2"
        " contradicts 1 in static_resources.clusters[0].metadata.filter_metadata.extproc.max_inflight"
        " in envoy.yaml, of the same pool 'chat'; give the setting once, or the same value in both"
    ]


def test_files_out_of_reach(tmp_path):
    assert errors(
        tmp_path,
        "dynamic_resources:\n  cds_config:\n    path_config_source: {path: /no/such/cds.yaml}\n",
    ) == [
        "envoy.yaml:3: dynamic_resources.cds_config.path_config_source.path: '/no/such/cds.yaml'"
        " doesn't exist; make the file readable for the router, under the same path"
    ]
    with pytest.raises(ConfigError, match="can't be read: Is a directory; check the path and its rights"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\); save it as UTF-8"):
        load(tmp_path / "latin.yaml")


def test_a_problem_in_a_file_that_is_pointed_to_names_that_file(tmp_path):
    (tmp_path / "cds.yaml").write_text("resources: [}")
    text = f"dynamic_resources: {{cds_config: {{path_config_source: {{path: {tmp_path}/cds.yaml}}}}}}"
    (message,) = errors(tmp_path, text)
    assert message.startswith("cds.yaml:1: is not YAML: did not find expected")


def test_a_bomb_of_anchors_is_no_load(tmp_path):
    levels = "\n".join(f"- &a{i} {{k: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}" for i in range(1, 60))
    text = (
        f"bomb:\n- &a0 {{x: 1}}\n{levels}\n"
        "static_resources: {listeners: [*a59], clusters: [{name: c, load_balancing_policy: *a59,"
        " metadata: {filter_metadata: {extproc: {alpha: *a59}}}}]}\n"
    )
    (message,) = errors(tmp_path, text)
    assert "extproc.alpha: {'k': [{...}, {...}, {...}]} must be a number" in message


# Anything at all: words of the format in any place, and any scalars

_WORDS = """
    static_resources dynamic_resources resources resource clusters listeners name metadata
    filter_metadata filterMetadata extproc max_inflight pool policy weight cache_tokens
    load_assignment endpoints lb_endpoints endpoint address socket_address port_value priority
    health_status load_balancing_weight eds_cluster_config eds_config service_name
    path_config_source path cds_config lds_config load_balancing_policy policies
    typed_extension_config typed_config override_host_sources header key route_config rds
    config_source route cluster_header typed_per_filter_config disabled request_body_buffer_limit
    cluster_type @type type_url value
""".split()  # noqa: SIM905
_TYPES = (
    "type.googleapis.com/envoy.config.cluster.v3.Cluster",
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    "type.googleapis.com/envoy.config.listener.v3.Listener",
    "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
    "type.googleapis.com/xds.type.v3.TypedStruct",
)
_KEYS = st.sampled_from(_WORDS) | st.text(max_size=3)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from((*_TYPES, "10.0.0.1", "chat", "extproc", "\x00", "/" + "a" * 5000))
)
_ANY = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


def mutated(draw: st.DrawFn, value: object) -> object:
    """``value`` with any of its parts replaced by anything."""
    if draw(st.integers(0, 12)) == 0:
        return draw(_ANY)
    if isinstance(value, dict):
        return {key: mutated(draw, item) for key, item in value.items()}
    if isinstance(value, list):
        return [mutated(draw, item) for item in value]
    return value


_BASE = {
    "static_resources": {
        "listeners": [
            {
                "typed_config": {
                    "@type": _TYPES[4],
                    "rds": {"config_source": {"path_config_source": {"path": "x"}}},
                    "route_config": {
                        "route": {"cluster_header": "x"},
                        "typed_per_filter_config": {"ext_proc": {}},
                    },
                },
                "request_body_buffer_limit": 5,
            }
        ],
        "clusters": [
            {
                "name": "chat",
                "metadata": {"filter_metadata": {"extproc": {"max_inflight": 5}}},
                "dns_lookup_family": "ALL",
                "eds_cluster_config": {"eds_config": {"path": "x"}, "service_name": "y"},
                "load_balancing_policy": {
                    "@type": _TYPES[3],
                    "override_host_sources": [
                        {"header": "x"},
                        {"metadata": {"key": "a", "path": [{"key": "b"}]}},
                    ],
                },
                "load_assignment": {
                    "endpoints": [
                        {
                            "priority": 1,
                            "lb_endpoints": [
                                {
                                    "endpoint": {
                                        "address": {"socket_address": {"address": "::1", "port_value": 1}}
                                    },
                                    "health_status": "HEALTHY",
                                    "load_balancing_weight": 3,
                                    "metadata": {"filter_metadata": {"extproc": {"weight": 1}}},
                                }
                            ],
                        }
                    ]
                },
            }
        ],
    },
    "resources": [{"@type": _TYPES[0], "name": "x"}],
}


@st.composite
def mutations(draw: st.DrawFn) -> object:
    return mutated(draw, _BASE)


def loads_or_refuses(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / name
        file.write_bytes(content)
        refused = None
        try:
            config = load(file)
        except ConfigError as error:
            refused = error
        if refused is None:
            assert config.files[0] == str(file)
        else:
            assert refused.problems
            assert str(refused).startswith(str(file))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations() | _ANY, st.sampled_from(["envoy.json", "envoy.yaml"]))
def test_any_structure_loads_or_is_refused(data, name):
    loads_or_refuses(json.dumps(data).encode(), name)


@settings(max_examples=200, deadline=None)
@given(st.binary() | st.text(alphabet="ab:-[]{}&*!? \n'\"#|>%@<0", max_size=60).map(str.encode))
@example(b"\xef\xbb\xbfstatic_resources: {}")
@example(b"? ")
@example(b"!ignore a: b")
@example(b"%YAML 9.9\n---\na")
@example(b"a: *b")
@example(b"<<: [1, {a: b}]")
def test_any_bytes_load_or_are_refused(content):
    loads_or_refuses(content, "envoy.yaml")
