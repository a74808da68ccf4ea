"""Opt-in (``make test-engine``): these tests start a real vLLM, which ``VLLM`` and ``MODEL`` name."""

from __future__ import annotations

from pathlib import Path

import pytest
import real_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def lab() -> real_vllm.Lab:
    try:
        return real_vllm.find()
    except RuntimeError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)  # each test would only repeat it


@pytest.fixture
def show(capsys):
    """Print past pytest's capture: the figures are what one runs these tests for."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="")

    return line
