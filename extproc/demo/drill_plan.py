"""What a drill is made of, in real time or in virtual: load, costs, and how long faults last."""

from __future__ import annotations

from math import ceil

from extproc.demo.personas import OUTPUT_TOKENS
from extproc.emulator.engine import CostModel, EngineConfig

#: A slower GPU than the emulator's default: the same load with fewer requests, which leaves the machine
#: some air. Seconds a step, a prompt token, a decoding sequence.
STEP_S, PREFILL_S, DECODE_S = 0.020, 5e-4, 4e-3
COST = CostModel(step_s=STEP_S, prefill_s=PREFILL_S, decode_s=DECODE_S)
STEP_TOKENS = EngineConfig().max_num_batched_tokens

#: What the router is told of it.
PREFILL_TOKENS_PER_S = round(1 / (PREFILL_S + STEP_S / STEP_TOKENS), 1)

#: Prompts of agents, tokens; all of them fit into the caches of the workers that are left.
PROMPT_TOKENS = (4_000, 6_000)

#: Of a prompt whose head is cached, about so many tokens are new.
NEW_TOKENS = 120

#: A fault lasts for this share of its slot, and no longer than FAULT_S; the rest is for recovery.
FAULT_SHARE, FAULT_S = 0.45, 20.0

#: A process that was killed is started again after this; one that was stopped goes on after ``STOP_S``.
DOWN_S, STOP_S = 5.0, 10.0

#: Factor of the slow worker.
SLOWNESS = 10.0


def request_rate(workers: int, load: float, cold_share: float) -> float:
    """Requests a second that keep the workers busy for this share of their time, with these caches full.

    A step with ``b`` sequences takes ``STEP_S + b DECODE_S``, so a request costs ``DECODE_S + STEP_S / b`` a
    token; at full load ``b`` is large.
    """
    cold_tokens = sum(PROMPT_TOKENS) / 2
    new_tokens = cold_share * cold_tokens + (1 - cold_share) * NEW_TOKENS
    request_s = OUTPUT_TOKENS * DECODE_S + new_tokens * PREFILL_S
    return load * workers / request_s


def alone_s(prompt_tokens: int) -> float:
    """TTFT of so long a prompt on an idle worker that holds nothing of it."""
    steps_s = ceil(prompt_tokens / STEP_TOKENS) * STEP_S
    return COST.frontend_s(prompt_tokens) + prompt_tokens * PREFILL_S + steps_s
