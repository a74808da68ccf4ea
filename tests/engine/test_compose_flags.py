"""The flags that docker-compose.yml gives to vLLM exist."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def test_vllm_knows_them():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    shown = subprocess.run(
        [os.environ["VLLM"], "serve", "--help=all"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    known = set(re.findall(r"--[a-z][a-z0-9-]+", shown))
    flags = {argument.partition("=")[0] for argument in compose["services"]["vllm-1"]["command"]}
    assert flags <= known
