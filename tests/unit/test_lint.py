"""`extproc lint` on traffic with planted faults, and on traffic that only looks like it.

LINT_SEEDS=100:140 runs other seeds, and more of them.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from lint_traffic import CLEAN, FAULTS, HINTS, VARIANTS, App, Text, Traffic, make_apps, make_log

from extproc.lint.findings import Finding
from extproc.lint.linter import Linter, Options
from extproc.lint.log import Entry
from extproc.prefix import chain
from extproc.prompt import Prompt, read_prompt

REQUESTS = 2000


def seeds(*usual: int) -> list[int]:
    chosen = os.environ.get("LINT_SEEDS")
    return list(range(*map(int, chosen.split(":")))) if chosen else list(usual)


def lint(traffic: Traffic, **options: int) -> tuple[Linter, list[Finding]]:
    linter = Linter(Options(**options))  # type: ignore[arg-type]
    linter.read(parse(traffic.lines))
    return linter, linter.report(min_tokens=2000, min_share=0.03)


def parse(lines: list[str]) -> list[Entry]:
    from extproc.lint.log import _parse

    entries = [_parse(line.encode(), "log", number) for number, line in enumerate(lines, 1)]
    assert all(isinstance(entry, Entry) for entry in entries)
    return entries  # type: ignore[return-value]


def sender(traffic: Traffic, finding: Finding) -> App:
    """Whose requests a finding shows; both must be one app's."""
    first, second = (traffic.apps[int(where.rpartition(":")[2]) - 1] for where in finding.where)
    assert first is second, f"{finding} compares {first.name} with {second.name}"
    return first


def check(traffic: Traffic, findings: list[Finding]) -> None:
    """Each planted fault is found once, for what it is, where it is, and nothing else is."""
    found: Counter[str] = Counter()
    for finding in findings:
        app = sender(traffic, finding)
        assert app.fault == finding.kind.value, f"{app.name}: {finding}"
        message, part = app.where
        assert message is None or (finding.place.message, finding.place.part) == (message, part), finding
        assert len(finding.tenants) <= 1, finding
        assert finding.losing <= finding.requests, finding
        found[app.name] += 1
    assert found == {app.name: 1 for app in traffic.apps if app.fault}


@pytest.mark.parametrize("seed", seeds(1))
def test_ten_faults_in_mixed_traffic(seed: int) -> None:
    """And a hint: what may be meant so is no fault."""

    def apps(random: Random) -> list[App]:
        faults = random.sample(sorted(FAULTS), 10)
        return make_apps(random, [*faults, *HINTS], random.sample(sorted(CLEAN), 8))

    traffic = make_log(seed, apps, REQUESTS)
    _, findings = lint(traffic)
    check(traffic, findings)
    assert sum(not finding.hint for finding in findings) == 10


@pytest.mark.parametrize("seed", seeds(2))
def test_every_other_fault(seed: int) -> None:
    """What the mixed traffic of this seed left out, and faults in unusual places."""
    left = [fault for fault in FAULTS if fault not in Random(f"{seed} lint").sample(sorted(FAULTS), 10)]
    traffic = make_log(seed, lambda random: make_apps(random, [*left, *VARIANTS], ["chat"]), 500)
    check(traffic, lint(traffic)[1])


@pytest.mark.parametrize("seed", seeds(3))
def test_silent_on_clean_traffic(seed: int) -> None:
    traffic = make_log(seed, lambda random: make_apps(random, [], sorted(CLEAN)), REQUESTS // 2)
    linter, findings = lint(traffic)
    assert findings == []
    assert linter.totals.bad_lines == 0


EXACT = [
    "time",
    "request-id",
    "session-id",
    "user",
    "number",
    "tool-order",
    "key-order",
    "white-space",
    "cache-salt",
    "order",
    "block",
]


@pytest.mark.parametrize("seed", seeds(4))
def test_costs_are_what_mending_saves(seed: int) -> None:
    """A cache is replayed over the log as it is, and over the same one without what was planted."""
    traffic = make_log(seed, lambda random: make_apps(random, EXACT, []), 450, mend=True)
    linter, findings = lint(traffic)
    hits, mended_hits = hit_tokens(traffic, traffic.lines), hit_tokens(traffic, traffic.mended)
    assert linter.totals.hit_tokens == sum(hits.values())
    assert len(findings) == len(EXACT)
    for finding in findings:
        app = sender(traffic, finding)
        saved = mended_hits[app.name] - hits[app.name]
        # Passages in changing order also share something by chance.
        near = 0.25 if app.fault in ("order", "block") else 0.1
        assert finding.tokens == pytest.approx(saved, rel=near), app.name


def hit_tokens(traffic: Traffic, lines: list[str]) -> Counter[str]:
    """Tokens that an endless cache has when their request comes, by app."""
    seen: set[int] = set()
    hits: Counter[str] = Counter()
    for entry, app in zip(parse(lines), traffic.apps, strict=True):
        prompt = read_prompt(entry.path, "application/json", "", entry.body)
        assert isinstance(prompt, Prompt)
        blocks = chain(prompt, block_tokens=16, chars_per_token=4.0, prefix_tokens=16).hashes
        hits[app.name] += 16 * next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return hits


@pytest.mark.parametrize("seed", seeds(5))
def test_little_memory_is_enough(seed: int) -> None:
    """With room for a few prompts only, faults in traffic that comes often are still found."""
    faults = ["time", "tool-order", "cache-salt"]
    traffic = make_log(seed, lambda random: make_apps(random, faults, ["no system"]), 200)
    linter, findings = lint(traffic, memory_bytes=1_000_000)
    assert linter.forgotten > 20
    assert linter.remembered + linter.forgotten == len(traffic.lines)
    check(traffic, findings)


def test_two_faults_of_one_template() -> None:
    """Each is told with its own cost; the first also tells what lies behind it."""

    def both(app: App, request: object) -> None:
        for fault in ("tool-order", "time"):
            FAULTS[fault][0](app, request)  # type: ignore[arg-type]

    def apps(random: Random) -> list[App]:
        return [App("both", Text(random), tools=6, change=both, fault="both")]

    traffic = make_log(6, apps, 60)
    first, second = sorted(lint(traffic)[1], key=lambda finding: finding.place.token)
    assert (first.kind.value, second.kind.value) == ("tool-order", "time")
    assert first.behind_tokens == pytest.approx(first.tokens + second.tokens, rel=0.15)
    assert second.behind_tokens == second.tokens
