"""The Envoy YAML as configuration: pools, workers, steering, files; and what passes by unread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from extproc.envoyconf import load
from extproc.fleet.config import PoolSettings, Steering

ROOT = Path(__file__).parents[2]
PREFIX = "type.googleapis.com/"
HCM = PREFIX + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
OVERRIDE_HOST = PREFIX + "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"


def endpoint(address="10.0.0.1", port=8000, **more):
    return {"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}, **more}


def cluster(name="chat", *endpoints, settings=None, **more):
    return {
        "name": name,
        "metadata": {"filter_metadata": {"extproc": settings or {}}},
        "load_assignment": {"endpoints": [{"lb_endpoints": list(endpoints)}]},
        **more,
    }


def policy(*sources, wrap=None):
    config = {"@type": OVERRIDE_HOST, "override_host_sources": list(sources)}
    return {"policies": [{"typed_extension_config": {"name": "p", "typed_config": wrap or config}}]}


def listener(route_config=None, **more):
    hcm = {"@type": HCM, **({"route_config": route_config} if route_config else {}), **more}
    return {"filter_chains": [{"filters": [{"name": "h", "typed_config": hcm}]}]}


@pytest.fixture
def conf(tmp_path):
    """Write plain data (or text) to files and load the first one."""

    def write(data, name="envoy.yaml", **others):
        for file, content in {**{k.replace("_", "."): v for k, v in others.items()}, name: data}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / file).write_text(text.replace("@DIR@", str(tmp_path)))
        return load(tmp_path / name)

    return write


def static(*clusters, listeners=()):
    return {"static_resources": {"clusters": list(clusters), "listeners": list(listeners)}}


def workers(config, pool="chat"):
    return [endpoint.address for endpoint in config.pools[pool].endpoints]


# The files that users copy


def test_our_yaml():
    config = load(ROOT / "envoy" / "envoy.yaml")
    assert config.warnings == ()
    assert config.pools.keys() == {"workers"}
    assert workers(config, "workers") == [f"127.0.0.1:{port}" for port in (8001, 8002, 8003, 8004)]
    assert config.clusters == {"workers": "workers"}
    assert config.steering == Steering()
    assert config.max_body_bytes == 16 * 1024 * 1024
    assert config.files == (config.source,) == (str(ROOT / "envoy" / "envoy.yaml"),)


def test_our_cluster_per_worker_yaml():
    config = load(ROOT / "envoy" / "cluster-per-worker.yaml")
    assert config.warnings == ()
    pairs = [(endpoint.cluster, endpoint.port) for endpoint in config.pools["workers"].endpoints]
    assert pairs == [("worker-1", 8001), ("worker-2", 8002), ("worker-3", 8003), ("worker-4", 8004)]
    assert config.clusters == dict.fromkeys(["workers", *(cluster for cluster, _ in pairs)], "workers")
    assert config.steering == Steering(cluster_headers=("x-extproc-cluster",))
    assert config.max_body_bytes == 16 * 1024 * 1024


# Pools and workers


def test_an_empty_object_or_null_makes_a_pool_and_another_cluster_is_none(conf):
    config = conf(
        static(
            cluster("a", endpoint(port=1)),
            {**cluster("b", endpoint(port=2)), "metadata": {"filter_metadata": {"extproc": None}}},
            {**cluster("c", endpoint(port=3)), "metadata": {"filter_metadata": {"other": {}}}},
            {"name": "d"},
        )
    )
    assert {name: pool.settings for name, pool in config.pools.items()} == {
        "a": PoolSettings(),
        "b": PoolSettings(),
    }
    assert config.clusters == {"a": "a", "b": "b"}
    assert config.max_body_bytes == 16 * 1024 * 1024  # no listener in sight
    assert config.warnings == ()


def test_settings_and_worker_overrides(conf):
    config = conf(
        static(
            cluster(
                "chat",
                endpoint(port=1),
                endpoint(
                    port=2,
                    metadata={
                        "filter_metadata": {
                            "extproc": {"max_inflight": "7", "weight": 0.5, "cache_tokens": 9000}
                        }
                    },
                ),
                endpoint(port=3, load_balancing_weight=4),
                settings={"max_inflight": 50, "policy": "lmetric", "max_load_ratio": "2.5"},
            )
        )
    )
    assert config.pools["chat"].settings == PoolSettings(
        max_inflight=50, policy="lmetric", max_load_ratio=2.5
    )
    rows = [(e.port, e.max_inflight, e.weight, e.cache_tokens) for e in config.pools["chat"].endpoints]
    assert rows == [(1, 50, 1.0, None), (2, 7, 0.5, 9000), (3, 50, 4.0, None)]


def test_clusters_of_one_pool_are_merged(conf):
    config = conf(
        static(
            cluster("w1", endpoint(port=1), settings={"pool": "chat", "max_inflight": 9}),
            cluster("w2", endpoint(port=2), settings={"pool": "chat", "max_inflight": "9", "fallbacks": 1}),
            cluster("w3", endpoint(port=3), settings={"pool": "chat"}),
        )
    )
    assert config.pools["chat"].settings == PoolSettings(max_inflight=9, fallbacks=1)
    assert [(e.port, e.cluster, e.max_inflight) for e in config.pools["chat"].endpoints] == [
        (1, "w1", 9),
        (2, "w2", 9),
        (3, "w3", 9),
    ]
    assert config.clusters == {"w1": "chat", "w2": "chat", "w3": "chat"}


def test_a_cluster_named_like_a_pool_stands_for_it(conf):
    config = conf(static(cluster("w1", endpoint(), settings={"pool": "chat"}), {"name": "chat"}))
    assert config.clusters == {"w1": "chat", "chat": "chat"}


def test_an_address_counts_where_its_priority_is_lowest(conf):
    def one(name, own, *others):
        return cluster(
            name,
            settings={"pool": "chat"},
            load_assignment={
                "endpoints": [
                    {"priority": 1, "lb_endpoints": [endpoint(port=port) for port in others]},
                    {"lb_endpoints": [endpoint(port=own)]},
                ]
            },
        )

    config = conf(static(one("w1", 1, 1, 2), one("w2", 2, 1, 2, 3)))
    assert [(e.port, e.cluster) for e in config.pools["chat"].endpoints] == [(1, "w1"), (2, "w2"), (3, "w2")]
    assert config.warnings == ()


def test_an_address_twice_is_a_warning(conf):
    config = conf(static(cluster("chat", endpoint(), endpoint("10.0.0.2"), endpoint())))
    assert workers(config) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    (warning,) = config.warnings
    assert warning.endswith(
        "lb_endpoints[2]: '10.0.0.1:8000' is in pool 'chat' twice; the one of 'chat' counts"
    )


def test_two_pools_may_share_an_address(conf):
    config = conf(static(cluster("a", endpoint()), cluster("b", endpoint())))
    assert workers(config, "a") == workers(config, "b")
    assert config.warnings == ()


@pytest.mark.parametrize(
    "left_out",
    [
        {"endpoint": {"address": {"pipe": {"path": "/run/vllm.sock"}}}},
        {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": "l"}}}},
        {"endpoint": {"address": {"socket_address": {"address": "10.0.0.9", "named_port": "http"}}}},
        {"endpoint_name": "elsewhere"},
        endpoint("10.0.0.9", 0),
    ],
)
def test_endpoints_that_cannot_be_picked_are_left_out_with_a_warning(conf, left_out):
    config = conf(static(cluster("chat", endpoint(), left_out)))
    assert workers(config) == ["10.0.0.1:8000"]
    (warning,) = config.warnings
    assert warning.endswith(
        "static_resources.clusters[0].load_assignment.endpoints[0].lb_endpoints[1]:"
        " has no IP address or DNS name with a port, so it can't be picked; left out"
    )


@pytest.mark.parametrize(
    ("status", "kept"),
    [
        ("HEALTHY", 1),
        ("DEGRADED", 1),
        ("NEWER", 1),
        ("UNHEALTHY", 0),
        ("DRAINING", 0),
        ("TIMEOUT", 0),
        (0, 1),
        (2, 0),
        (99, 1),
    ],
)
def test_health_status(conf, status, kept):
    config = conf(static(cluster("chat", endpoint(health_status=status))))
    assert len(config.pools["chat"].endpoints) == kept


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("10.0.0.1", "10.0.0.1:8000"),
        ("0:0:0::0001", "[::1]:8000"),
        ("FD00::A", "[fd00::a]:8000"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:8000"),
        ("vLLM.Example", "vllm.example:8000"),
    ],
)
def test_addresses_are_spelled_as_envoy_prints_them(conf, written, address):
    assert workers(conf(static(cluster("chat", endpoint(written))))) == [address]


@pytest.mark.parametrize(
    ("more", "family"),
    [
        ({}, "AUTO"),
        ({"type": "STRICT_DNS", "dns_lookup_family": "V4_ONLY"}, "V4_ONLY"),
        (
            {
                "cluster_type": {
                    "name": "envoy.clusters.dns",
                    "typed_config": {
                        "@type": PREFIX + "envoy.extensions.clusters.dns.v3.DnsCluster",
                        "dns_lookup_family": "ALL",
                    },
                }
            },
            "ALL",
        ),
    ],
)
def test_lookup_family(conf, more, family):
    config = conf(static(cluster("chat", endpoint("vllm"), **more)))
    assert config.pools["chat"].endpoints[0].lookup_family == family


def test_no_pool_and_no_worker_are_warnings(conf):
    (warning,) = conf(static({"name": "a"})).warnings
    assert "no cluster has the key extproc in metadata.filter_metadata, so nothing is routed" in warning
    (warning,) = conf(static(cluster("chat"))).warnings
    assert warning.endswith("pool 'chat' has no worker that can be picked")


# Steering and body limit


def test_override_host_sources(conf):
    chat = cluster(
        "chat",
        endpoint(),
        load_balancing_policy=policy(
            {"header": "X-Pick"}, {"metadata": {"key": "my.ns", "path": [{"key": "pick"}]}}
        ),
    )
    not_a_pool = {**cluster("other"), "metadata": {}, "load_balancing_policy": policy({"header": "x-no"})}
    assert conf(static(chat, not_a_pool)).steering == Steering((("my.ns", "pick"),), ("x-pick",))


def test_override_host_inside_another_policy_or_a_typed_struct(conf):
    wrapped = {
        "@type": PREFIX + "xds.type.v3.TypedStruct",
        "type_url": OVERRIDE_HOST,
        "value": {"override_host_sources": [{"header": "x-pick"}]},
    }
    nested = {"@type": PREFIX + "some.newer.Policy", "child": policy(wrap=wrapped)}
    chat = cluster("chat", endpoint(), load_balancing_policy=policy(wrap=nested))
    assert conf(static(chat)).steering == Steering((), ("x-pick",))


def test_a_longer_metadata_path_is_a_warning(conf):
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": "a"}, {"key": "b"}]}}
    config = conf(static(cluster("chat", endpoint(), load_balancing_policy=policy(source))))
    assert config.steering == Steering()
    (warning,) = config.warnings
    assert "override_host_sources[0]: has a metadata path that is not exactly one key" in warning


def test_cluster_headers_of_routes_with_ext_proc(conf):
    def route(header, **more):
        return {"match": {"prefix": "/"}, "route": {"cluster_header": header}, **more}

    off = {
        "x": {"@type": PREFIX + "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}
    }
    other_off = {
        "x": {"@type": PREFIX + "envoy.extensions.filters.http.lua.v3.LuaPerRoute", "disabled": True}
    }
    routes = [
        route("X-Cluster"),
        route("x-unrelated", typed_per_filter_config=off),
        route("x-second", typed_per_filter_config=other_off),
    ]
    config = conf(
        static(cluster("chat", endpoint()), listeners=[listener({"virtual_hosts": [{"routes": routes}]})])
    )
    assert config.steering == Steering((), (), ("x-cluster", "x-second"))
    assert config.warnings == ()


def test_a_pool_that_nothing_steers_is_a_warning(conf):
    config = conf(static(cluster("chat", endpoint()), listeners=[listener({"virtual_hosts": []})]))
    assert config.steering == Steering()
    (warning,) = config.warnings
    assert "'chat' is a pool, but no override_host policy and no route's cluster_header" in warning


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 1 << 20),
        ({"per_connection_buffer_limit_bytes": 4 << 20}, 4 << 20),
        ({"per_connection_buffer_limit_bytes": 1000}, 1 << 20),
        (
            {"a": [{"request_body_buffer_limit": str(32 << 20)}, {"requestBodyBufferLimit": 5 << 20}]},
            32 << 20,
        ),
        ({"a": {"per_request_buffer_limit_bytes": 8 << 20}}, 8 << 20),
        ({"request_body_buffer_limit": 1 << 40}, (1 << 31) - (1 << 20)),
        ({"request_body_buffer_limit": "lots"}, 1 << 20),
    ],
)
def test_max_body_bytes(conf, fields, limit):
    assert (
        conf(static(cluster("chat", endpoint()), listeners=[{**listener(), **fields}])).max_body_bytes
        == limit
    )


# Files


def resources(kind, *items):
    return {"version_info": "1", "resources": [{"@type": PREFIX + kind, **item} for item in items]}


CLUSTER = "envoy.config.cluster.v3.Cluster"
ASSIGNMENT = "envoy.config.endpoint.v3.ClusterLoadAssignment"
LISTENER = "envoy.config.listener.v3.Listener"
ROUTES = "envoy.config.route.v3.RouteConfiguration"


def source(file):
    return {"path_config_source": {"path": f"@DIR@/{file}"}}


def test_json(conf):
    config = conf(static(cluster("chat", endpoint())), name="envoy.json")
    assert workers(config) == ["10.0.0.1:8000"]


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy.json"])
def test_a_byte_order_mark_is_no_part_of_the_text(conf, name):
    config = conf("\ufeff" + json.dumps(static(cluster("chat", endpoint()))), name=name)
    assert workers(config) == ["10.0.0.1:8000"]


def test_proto_json_names(conf):
    config = conf(
        {
            "staticResources": {
                "clusters": [
                    {
                        "name": "chat",
                        "metadata": {"filterMetadata": {"extproc": {"max_inflight": 5}}},
                        "loadAssignment": {
                            "endpoints": [
                                {
                                    "lbEndpoints": [
                                        {
                                            "loadBalancingWeight": "3",
                                            "endpoint": {
                                                "address": {
                                                    "socketAddress": {
                                                        "address": "10.0.0.1",
                                                        "portValue": "80",
                                                    }
                                                }
                                            },
                                        }
                                    ]
                                }
                            ]
                        },
                        "loadBalancingPolicy": {
                            "policies": [
                                {
                                    "typedExtensionConfig": {
                                        "typedConfig": {
                                            "@type": OVERRIDE_HOST,
                                            "overrideHostSources": [{"header": "x-pick"}],
                                        }
                                    }
                                }
                            ]
                        },
                    }
                ]
            }
        },
        name="envoy.json",
    )
    (worker,) = config.pools["chat"].endpoints
    assert (worker.address, worker.weight, worker.max_inflight) == ("10.0.0.1:80", 3.0, 5)
    assert config.steering == Steering((), ("x-pick",))


def test_an_xds_file_itself(conf):
    wrapped = {
        "@type": PREFIX + "envoy.service.discovery.v3.Resource",
        "name": "b",
        "resource": {"@type": PREFIX + CLUSTER, **cluster("b", endpoint())},
    }
    data = resources(CLUSTER, cluster("a", endpoint()))
    data["resources"] += [wrapped, {"@type": PREFIX + "some.newer.Thing", "x": 1}, "nonsense", {}]
    assert conf(data).pools.keys() == {"a", "b"}


def test_all_files_that_a_bootstrap_points_to(conf, tmp_path):
    eds = {
        "eds_cluster_config": {"service_name": "svc", "eds_config": source("eds.json")},
        "load_assignment": None,
        "type": "EDS",
    }
    routes = [{"match": {"prefix": "/"}, "route": {"cluster_header": "x-cluster"}}]
    config = conf(
        {
            "dynamic_resources": {
                "cds_config": source("cds.yaml"),
                "lds_config": {"path": "@DIR@/lds.yaml"},
            }
        },
        cds_yaml=resources(
            CLUSTER,
            cluster("chat", **eds),
            {"name": "other", "eds_cluster_config": {"eds_config": source("no")}},
        ),
        eds_json=resources(
            ASSIGNMENT,
            {"cluster_name": "chat", "endpoints": [{"lb_endpoints": [endpoint("10.0.0.9")]}]},
            {"cluster_name": "svc", "endpoints": [{"lb_endpoints": [endpoint("10.0.0.2")]}]},
            {"cluster_name": "svc", "endpoints": [{"lb_endpoints": [endpoint("10.0.0.3")]}]},
        ),
        lds_yaml=resources(
            LISTENER, listener(rds={"config_source": source("rds.yaml")}, request_body_buffer_limit=3 << 20)
        ),
        rds_yaml=resources(
            ROUTES, {"virtual_hosts": [{"routes": routes}], "request_body_buffer_limit": 9 << 20}
        ),
    )
    assert workers(config) == ["10.0.0.2:8000"]
    assert config.steering == Steering((), (), ("x-cluster",))
    assert config.max_body_bytes == 9 << 20
    assert [Path(file).name for file in config.files] == [
        "envoy.yaml",
        "cds.yaml",
        "lds.yaml",
        "eds.json",
        "rds.yaml",
    ]
    assert config.warnings == ()


def test_a_relative_path_counts_from_the_working_directory_or_else_from_the_file(conf, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    data = {"dynamic_resources": {"cds_config": {"path_config_source": {"path": "cds.yaml"}}}}
    monkeypatch.chdir(elsewhere)
    config = conf(data, cds_yaml=resources(CLUSTER, cluster("beside", endpoint())))
    assert config.pools.keys() == {"beside"}
    (elsewhere / "cds.yaml").write_text(json.dumps(resources(CLUSTER, cluster("here", endpoint()))))
    assert load(config.source).pools.keys() == {"here"}


def test_listener_files_out_of_reach_are_a_warning(conf):
    config = conf(
        {**static(cluster("chat", endpoint())), "dynamic_resources": {"lds_config": source("lds.yaml")}}
    )
    (warning,) = config.warnings
    assert "lds_config.path_config_source.path: '" in warning
    assert "doesn't exist; make the file readable for the router, under the same path" in warning
    assert len(config.files) == 2  # watched all the same


def test_endpoints_over_the_network_are_a_warning(conf):
    eds = {"eds_cluster_config": {"eds_config": {"ads": {}}}, "load_assignment": None}
    first, second = conf(static(cluster("chat", **eds))).warnings
    assert "gets its endpoints over the network, so the router can't see them" in first
    assert "pool 'chat' has no worker" in second


# What isn't ours


def test_unknown_fields_types_and_values_pass_by(conf):
    junk = {
        "@type": PREFIX + "envoy.contrib.filters.http.golang.v3alpha.Config",
        "field_of_2030": [1, {"a": None}],
    }
    chat = cluster(
        "chat",
        endpoint(new_in_2030=junk),
        type="TYPE_OF_2030",
        dns_lookup_family="FAMILY_OF_2030",
        connect_timeout="soon",
        typed_extension_protocol_options={"x": junk},
        load_balancing_policy={"policies": [junk, {"typed_extension_config": {"typed_config": junk}}]},
        transport_socket=junk,
        lb_policy=17,
    )
    chat["load_assignment"]["new_in_2030"] = junk
    config = conf(
        {
            **static(chat, "not a cluster", None, {"name": 7}, {"metadata": 3}, listeners=[junk, 3, None]),
            "new_in_2030": junk,
            "admin": 3,
            "dynamic_resources": {"cds_config": {"ads": {}}, "lds_config": 3},
        }
    )
    assert workers(config) == ["10.0.0.1:8000"]


def test_yaml_as_envoy_reads_it(conf):
    config = conf("""
!ignore shared:
- &worker {endpoint: {address: {socket_address: {address: 10.0.0.1, port_value: 0x50}}}}
- &settings {max_inflight: 010, max_load_ratio: 1.5}
static_resources:
  clusters:
  - name: on-call
    type: STATIC
    metadata:
      filter_metadata:
        extproc:
          <<: *settings
          max_load_ratio: 2.5
          alpha: .5
          chars_per_token: 1e1
          !ignore nonsense: 3
    load_assignment: {endpoints: [{lb_endpoints: [*worker]}]}
---
a second document: doesn't count
""")
    assert workers(config, "on-call") == ["10.0.0.1:80"]
    assert config.pools["on-call"].settings == PoolSettings(
        max_inflight=8, max_load_ratio=2.5, alpha=0.5, chars_per_token=10.0
    )


def test_yaml_1_1_has_no_say(conf):
    config = conf("""
static_resources:
  clusters:
  - name: 12:30:45
    metadata: {filter_metadata: {extproc: {pool: 2024-01-01}}}
    load_assignment:
      endpoints:
      - lb_endpoints: [{endpoint: {address: {socket_address: {address: 1_0, port_value: 1}}}}]
""")
    assert config.clusters == {"12:30:45": "2024-01-01"}
    assert workers(config, "2024-01-01") == ["1_0:1"]


def test_the_recommended_yaml_means_the_same_as_json(tmp_path):
    file = ROOT / "envoy" / "cluster-per-worker.yaml"
    (tmp_path / "envoy.json").write_text(json.dumps(yaml.safe_load(file.read_text())))
    left, right = load(file), load(tmp_path / "envoy.json")
    assert (left.pools, left.steering, left.clusters, left.max_body_bytes) == (
        right.pools,
        right.steering,
        right.clusters,
        right.max_body_bytes,
    )
