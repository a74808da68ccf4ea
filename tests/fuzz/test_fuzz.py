"""A short run of the fuzzer, another one each time; ``make fuzz`` is the long one."""

from __future__ import annotations

import random

import fuzz


def test_some_thousand_cases() -> None:
    done = fuzz.run(5_000, random.SystemRandom().randrange(10**6))
    # It gets everywhere, or it shows nothing.
    for what in ("bodies read", "unreadable bodies", "streams", "damaged messages", "messages that are none"):
        assert done[what] > 50, done
    assert done["disturbances"] > 20
    assert done["refusals"] > 0
