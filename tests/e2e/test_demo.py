"""``extproc demo`` as a user runs it, small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def demo(*arguments):
    command = [sys.executable, "-m", "extproc.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_small_swarm(tmp_path):
    figures = tmp_path / "figures.json"
    # Twelve prompts fit into three caches if each has one home, and not into each cache.
    small = ["--workers", "3", "--personas", "12", "--streams", "12", "--requests", "10"]
    done = demo(*small, "--rows", "swarm", "--speedup", "20", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(figures.read_text())
    assert report["settings"] == {
        "streams": 12,
        "personas": 12,
        "workers": 3,
        "requests": 10,
        "speedup": 20.0,
        "seed": 1,
        "warmup_share": 1 / 3,
    }
    before, after = report["rows"]
    assert (before["arm"], after["arm"]) == ("round robin", "prefix affinity")
    for row in (before, after):
        assert row["workload"] == "swarm"
        assert row["requests"] == 80
        assert row["failures"] == 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]
        assert row["busiest_over_mean"] >= 1
    assert before["busiest_over_mean"] < 1.1
    assert after["hit_rate"] > 0.9 > before["hit_rate"]
    assert "prefix affinity" in done.stdout
    assert "12 streams, 12 personas" in done.stdout


def test_wrong_options_are_refused():
    done = demo("--workers", "0")
    assert done.returncode == 2
    assert "--workers: 0 is less than 1" in done.stderr
