"""Tests that start a real vLLM, which ``VLLM`` and ``MODEL`` name, are opt-in: ``make test-engine``."""

from __future__ import annotations

import pytest
import real_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
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
