"""Whether a difference is one that the prompt's author could have avoided, and of which kind.

Equal text behind a difference isn't always a fault. What follows an answer of the model was written because
of that answer: two tasks whose agents open the same file share the file's text, but no author can put it in
front. So behind the opening (tools, system prompt, first message) a difference only counts within one
conversation, which shows when the new prompt goes on where the old one ended, with the model's own words in
between. And where whole documents differ, text behind them is a fault only if it is the template's, which
most of its requests have, not another document that happens to come twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.lint.differences import Comparison, Difference, Sort
from extproc.lint.kinds import Kind, same_pieces, same_without_white_space, value_kinds
from extproc.prompt import canonical as c

#: What differs in more tokens than this is no value (a time, an id, a name) but a passage.
VALUE_TOKENS = 48

#: The same answer of at least this many bytes is no coincidence.
_OWN_WORDS_BYTES = 48

#: A part of the template is what at least this share of its requests have.
_TEMPLATE_SHARE = 0.5

_ASSISTANT = c.ROLE + b"assistant"

#: Of several values side by side, which one gives the finding its name.
_FIRST = (
    Kind.TIME,
    Kind.ID,
    Kind.USER,
    Kind.NUMBER,
    Kind.MEDIA,
    Kind.WORDS,
    Kind.TOKENS,
    Kind.ORDER,
    Kind.TOOL_ORDER,
    Kind.KEY_ORDER,
    Kind.WHITE_SPACE,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A fault.

    ``kinds``: what it is, first what gives it its name. ``in_history``: it shows between turns of one
    conversation only. ``equal_end``: up to here the equal text behind it counts. Without ``kinds`` what
    follows is equal by chance, and so is part of a passage that differs.
    """

    kinds: tuple[Kind, ...]
    in_history: bool
    equal_end: int


def judge(
    comparison: Comparison,
    difference: Difference,
    *,
    opening_bytes: int,
    head_bytes: int,
    block_bytes: int,
    bytes_per_token: float,
    is_ids: bool,
    having_share: float,
) -> Verdict | None:
    """The verdict on a difference, None if it is none that could be mended.

    ``opening_bytes``, ``head_bytes``: the new prompt's. ``having_share``: the share of the template's
    requests that have the equal text, or what has moved.
    """
    data, start, end = comparison.data, difference.start, difference.end
    equal_end = difference.equal_end
    if difference.sort is Sort.SALT:
        return Verdict((Kind.SALT,), False, equal_end)
    if difference.sort is Sort.MODEL:
        return Verdict((Kind.MODEL,), False, equal_end)
    parts = [difference, *difference.others]
    size = max(end - start, sum(len(part.old) for part in parts))
    turns, old_turns = data.count(c.ROLE, start, end), sum(part.old.count(c.ROLE) for part in parts)
    same_conversation = not is_ids and _same_conversation(comparison, difference)
    orders = [part for part in parts if part.sort is Sort.ORDER]
    if orders:
        if not same_conversation and (start >= opening_bytes or having_share < _TEMPLATE_SHARE):
            return None
        kind = Kind.TOOL_ORDER if orders[0].is_json else Kind.ORDER
        return Verdict((kind,), start >= opening_bytes, equal_end)
    if old_turns > turns and same_conversation:
        return Verdict((Kind.WINDOW,), True, equal_end)
    in_head = end <= head_bytes
    in_opening = in_head or opening_bytes - end >= block_bytes
    if not in_opening and not same_conversation:
        return None
    if not in_head and not same_conversation:
        equal_end = min(equal_end, opening_bytes)
    if size <= VALUE_TOKENS * bytes_per_token or all(part.spelled for part in parts):
        kinds = set().union(*(_part_kinds(data, part, is_ids) for part in parts))
        if not in_opening and Kind.WORDS in kinds:
            return Verdict((Kind.HISTORY,), True, equal_end)
        return Verdict(tuple(sorted(kinds, key=_FIRST.index)), not in_opening, equal_end)
    if not in_head and same_conversation:
        return Verdict((Kind.HISTORY,), True, equal_end)
    if same_conversation:  # what the system prompt says of this turn, before all that was said
        return Verdict((Kind.BLOCK,), True, equal_end)
    if having_share < _TEMPLATE_SHARE or equal_end - end < size / 2:
        return Verdict((), False, end)
    in_tools = data.startswith(c.TOOLS) and c.ROLE not in data[:start]
    return Verdict((Kind.TOOLS if in_tools else Kind.BLOCK,), False, equal_end)


def _part_kinds(data: bytes, part: Difference, is_ids: bool) -> set[Kind]:
    if is_ids:
        return {Kind.TOKENS}
    if part.spelled:
        same = same_without_white_space(part.new, part.old)
        return {Kind.WHITE_SPACE if same else Kind.KEY_ORDER}
    if part.sort is Sort.ORDER:
        return {Kind.TOOL_ORDER if part.is_json else Kind.ORDER}
    if same_pieces(part.new, part.old):
        return {Kind.ORDER}
    return value_kinds(data, part.start, part.new, part.old)


def _same_conversation(comparison: Comparison, difference: Difference) -> bool:
    """Whether the new prompt is a later turn of the old one's conversation.

    All of the old prompt up to its last message stands in the new one, which goes on with an answer; and
    what both have behind the difference holds words of the model.
    """
    data, old = comparison.data, comparison.old
    last_message = old.rfind(c.ROLE)
    if last_message < 0 or comparison.old_matched_end < last_message:
        return False
    if data.find(_ASSISTANT, comparison.matched_end) < 0:
        return False
    start = data.find(_ASSISTANT, difference.end, comparison.matched_end)
    while start >= 0:
        end = data.find(c.ROLE, start + 2)
        end = len(data) if end < 0 else end
        if min(end, comparison.matched_end) - start - len(_ASSISTANT) >= _OWN_WORDS_BYTES:
            return True
        start = data.find(_ASSISTANT, end, comparison.matched_end)
    return False
