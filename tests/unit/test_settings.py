"""The settings tables: what they accept, what they say, and that the documentation shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.config import PoolSettings
from extproc.fleet.settings import (
    POOL_SETTINGS,
    ROUTE_SETTINGS,
    WORKER_SETTINGS,
    RouteOverrides,
    parse,
    route_overrides,
)

REQUESTS = "use a whole number (requests) from 1 to 1000000; the default is 120"
RATIO = "use a number from 1 to 1000; the default is 1.5"
TOKENS = "use a whole number (tokens) from 1 to 10000000000"
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_documentation_shows_exactly_the_tables():
    lines = DOCUMENT.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("| key | type | unit |")]
    shown = []
    for start in starts:
        rows = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            rows.append(line)
        shown.append(rows)
    assert shown == [
        [setting.row for setting in table] for table in (POOL_SETTINGS, WORKER_SETTINGS, ROUTE_SETTINGS)
    ]


def test_every_pool_setting_is_in_the_table_once():
    names = [setting.name for setting in POOL_SETTINGS]
    assert sorted(names) == sorted({*PoolSettings.__dataclass_fields__, "pool"})


@pytest.mark.parametrize("table", [POOL_SETTINGS, WORKER_SETTINGS])
def test_defaults_and_bounds_are_allowed_values(table):
    for setting in table:
        for value in (setting.default, setting.low, setting.high, *setting.choices):
            if value is None:
                continue
            parsed, errors = parse(table, {setting.name: value})
            assert not errors
            assert parsed == {setting.name: value}


@pytest.mark.parametrize("table", [POOL_SETTINGS, WORKER_SETTINGS])
def test_values_beyond_the_bounds_are_errors(table):
    for setting in table:
        for bound, step, word in ((setting.low, -1, "small"), (setting.high, 1, "large")):
            if bound is None:
                continue
            parsed, errors = parse(table, {setting.name: bound + step})
            assert parsed == {}
            assert [error.message for error in errors] == [f"is too {word}"]


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(7, 7), (7.0, 7), ("7", 7), ("7.0", 7), ("1e2", 100)],
)
def test_an_integer_in_any_spelling(value, parsed):
    values, errors = parse(POOL_SETTINGS, {"max_inflight": value})
    assert not errors
    assert values == {"max_inflight": parsed}
    assert type(values["max_inflight"]) is int


def test_a_number_is_a_float():
    values, _ = parse(POOL_SETTINGS, {"max_load_ratio": 2, "alpha": "0.25"})
    assert values == {"max_load_ratio": 2.0, "alpha": 0.25}
    assert all(type(value) is float for value in values.values())


def test_null_is_unset():
    assert parse(POOL_SETTINGS, {"cache_tokens": None, "policy": None}) == ({}, [])


@pytest.mark.parametrize(
    ("key", "value", "message", "fix"),
    [
        ("max_inflght", 60, "unknown key in a pool's settings", "did you mean max_inflight?"),
        ("max_inflight", 0, "is too small", REQUESTS),
        ("max_inflight", 1.5, "must be a whole number", REQUESTS),
        ("max_inflight", True, "must be a number", REQUESTS),
        ("max_inflight", "many", "must be a number", REQUESTS),
        ("max_load_ratio", "nan", "must be a finite number", RATIO),
        ("max_load_ratio", "inf", "must be a finite number", RATIO),
        ("cache_tokens", 10**30, "is too large", TOKENS),
        ("cache_tokens", [1], "must be a number", TOKENS),
        ("content_format", "parts", "is none of the known values", "use one of string, openai"),
        ("pool", 3, "must be a non-empty string", "give a name in quotes"),
        ("pool", "", "must be a non-empty string", "give a name in quotes"),
    ],
)
def test_messages(key, value, message, fix):
    parsed, (error,) = parse(POOL_SETTINGS, {key: value}, "a pool's settings")
    assert parsed == {}
    assert (error.key, error.value, error.message, error.fix) == (key, value, message, fix)


def test_an_unknown_key_like_none_lists_the_known_ones():
    _, (error,) = parse(WORKER_SETTINGS, {"zzz": 1})
    assert error.fix == f"remove it; known keys: {', '.join(setting.name for setting in WORKER_SETTINGS)}"


@given(st.dictionaries(st.text() | st.sampled_from([s.name for s in POOL_SETTINGS]), st.from_type(object)))
def test_parse_never_raises_and_makes_valid_settings(values):
    parsed, errors = parse(POOL_SETTINGS, values)
    assert (
        parsed.keys()
        | {error.key for error in errors}
        | {key for key, value in values.items() if value is None}
        == values.keys()
    )
    parsed.pop("pool", None)
    PoolSettings(**parsed)


def test_route_overrides():
    metadata = [
        ("x-extproc-pool", "chat"),
        ("x-extproc-policy", "random"),
        ("x-extproc-debug", "true"),
        ("x-request-id", "1"),
        ("trace-bin", b"\x00"),
    ]
    assert route_overrides(metadata) == (RouteOverrides("chat", "random", True), [])
    assert route_overrides([("user-agent", "envoy")]) == (RouteOverrides(), [])


def test_a_bad_route_override_has_no_effect_but_is_told():
    overrides, problems = route_overrides(
        [
            ("x-extproc-policy", "fastest"),
            ("x-extproc-polcy", "random"),
            ("x-extproc-debug", b"\xff"),
            ("x-extproc-pool", "chat"),
        ]
    )
    assert overrides == RouteOverrides(pool="chat")
    assert problems == [
        "x-extproc-policy: 'fastest': is none of the known values;"
        " use one of prefix-hash, predicted, lmetric, least-request, round-robin, random",
        "x-extproc-polcy: 'random': unknown key in the route's grpc_initial_metadata;"
        " did you mean x-extproc-policy?",
        "x-extproc-debug: '\ufffd': must be true or false; use one of true, false",
    ]
