"""`extproc lint` as people and CI use it: exit codes, both outputs, and no word of a prompt."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from lint_traffic import CLEAN, FAULTS, HINTS, App, make_apps, make_log

from extproc.cli import main
from extproc.routing.demand import digest

REQUESTS = 20 * (len(FAULTS) + len(HINTS) + 1)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with everything in it, two lines of which can't be used."""

    def apps(random: Random) -> list[App]:
        return make_apps(random, [*FAULTS, *HINTS], ["chat"])

    file = tmp_path_factory.mktemp("lint") / "faulty.jsonl"
    lines = make_log(7, apps, REQUESTS).lines
    file.write_text("\n".join([*lines, "{oops", '{"body": {"model": "m"}}']) + "\n")
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lint") / "small.jsonl"
    lines = make_log(8, lambda random: make_apps(random, ["time", "user"], ["chat"]), 90).lines
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lint") / "clean.jsonl"
    lines = make_log(8, lambda random: make_apps(random, [], random.sample(sorted(CLEAN), 4)), 120).lines
    file.write_text("\n".join(lines))
    return file


def words_of(file: Path) -> set[str]:
    """Every long word of the log's prompts."""
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.update(
                word for word in value.split() if len(word) > 7 and word.isalpha() and word != "assistant"
            )
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                collect(inner)

    for line in file.read_text().splitlines()[:-2]:
        entry = json.loads(line)
        body = entry.get("body") or entry["request"]
        collect(json.loads(body) if isinstance(body, str) else body)
    return found


def test_report(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(faulty)]) == 1
    text, errors = capsys.readouterr()
    assert errors == ""
    assert max(map(len, text.splitlines())) <= 100
    assert f"{faulty}:{REQUESTS + 1}: not JSON" in text.replace("\n  ", " ")
    assert f"{faulty}:{REQUESTS + 2}: no prompt: no_prompt" in text.replace("\n  ", " ")
    assert "tokens" in text
    assert "per day" in text
    assert text.count("\n  fix") == len(FAULTS) + len(HINTS)


def test_nothing_of_a_prompt_is_told(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(faulty)
    assert len(words) > 1000
    for options in ([], ["--json"]):
        main(["lint", str(faulty), *options])
        told = capsys.readouterr().out
        assert not [word for word in words if word in told]
        assert "time 0" not in told  # a tenant's name
        assert "example.com" not in told


def test_text_on_demand(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lint", str(faulty), "--show-text", "40", "--json"])
    findings = {finding["kind"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    first, second = findings["time"]["text"]
    assert first != second
    assert first.partition("[[")[0] == second.partition("[[")[0]
    assert len(first) < 200
    assert first.rpartition("]]")[2].strip().split()[1] in faulty.read_text()
    assert main(["lint", str(faulty), "--show-text", "40"]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_json(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(faulty), "--json", "--prefill-tokens-per-s", "5000"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["bad_lines"], report["per"]) == (REQUESTS, 2, "day")
    assert [(bad["line"], bad["why"]) for bad in report["bad_lines_named"]][1] == (
        REQUESTS + 2,
        "no prompt: no_prompt",
    )
    assert {f["kind"] for f in report["findings"]} == {*FAULTS, *HINTS}
    for finding in report["findings"]:
        assert finding["severity"] == ("hint" if finding["kind"] in HINTS else "fault")
        assert finding["ms_per_unit"] == pytest.approx(finding["tokens_per_unit"] / 5, abs=1)
        assert finding["tenants"] == [digest(json.loads(line_of(finding["lines"][0]))["tenant"])]
        assert "text" not in finding
    costs = [f["lost_tokens"] for f in report["findings"] if f["severity"] == "fault"]
    assert costs == sorted(costs, reverse=True)


def line_of(where: str) -> str:
    name, _, number = where.rpartition(":")
    return Path(name).read_text().splitlines()[int(number) - 1]


def test_clean(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(clean)]) == 0
    assert "no prompt breaks its own caching" in capsys.readouterr().out


def test_hints_alone_fail_no_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(make_log(9, lambda random: make_apps(random, list(HINTS), []), 60).lines))
    assert main(["lint", str(file)]) == 0
    assert "hint 1" in capsys.readouterr().out


def test_standard_input_and_gzip(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped = tmp_path / "log.gz"
    zipped.write_bytes(gzip.compress(small.read_bytes()))
    found = []
    for data, argument in ((b"", str(zipped)), (zipped.read_bytes(), "-"), (small.read_bytes(), "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[type-var]
        assert main(["lint", argument, "--json"]) == 1
        findings = json.loads(capsys.readouterr().out)["findings"]
        found.append([(f["kind"], f["family"], f["lost_tokens"]) for f in findings])
    assert found[0] == found[1] == found[2]


def test_thresholds(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for options in ([], ["--min-share", "0.5"], ["--min-tokens", "1000000"]):
        code = main(["lint", str(small), "--json", *options])
        counts.append(len(json.loads(capsys.readouterr().out)["findings"]))
        assert code == (1 if counts[-1] else 0)
    assert counts[0] > counts[1] > counts[2] == 0


def test_a_difference_in_the_last_block_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same prompts cost something only where a whole block follows."""
    file = tmp_path / "log.jsonl"
    head = "Rules apply to all. " * 100
    for behind, code in (("\nGo.", 0), ("\nGo on with care. " * 60, 1)):
        bodies = [{"prompt": f"{head}Case 48{n:03}.{behind}"} for n in range(50)]
        file.write_text("\n".join(map(json.dumps, bodies)))
        assert main(["lint", str(file)]) == code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "no usable request"),
        ("oops\n{}\n", "no usable request"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n', "only hash_ids"),
    ],
)
def test_unusable(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["lint", str(file)]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert message in errors


@pytest.mark.parametrize("arguments", [[], ["x", "--server", "127.0.0.1:1"]])
def test_what_to_look_at(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", *arguments]) == 2
    assert "FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--min-share=2", "--prefill-tokens-per-s=0", "--block-tokens=1.5", "--requests-per-day=nan"]
)
def test_options_are_checked(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["lint", "log", option])
    assert stopped.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err
