"""Programs from outside Python that some tests need."""

from __future__ import annotations

import os
import shutil

import pytest

#: Set where nothing may be skipped for want of a program: in CI, which installs them (.ci/run).
REQUIRE = "EXTPROC_REQUIRE_PROGRAMS"


def program(*names: str, package: str) -> str:
    """Path of the first of these that is here; else the test is skipped, or fails where it may not be."""
    for name in names:
        if found := shutil.which(name):
            return found
    message = f"{' or '.join(names)} isn't here: apt-get install {package}"
    if os.environ.get(REQUIRE):
        pytest.fail(message)
    pytest.skip(message)
