from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.emulator import tokens

TEXT = st.text(st.characters(), max_size=200)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
SPECIALS = {tokens.BEGIN, tokens.MESSAGE_START, tokens.MESSAGE_END, tokens.TOOLS, tokens.PART}


def split(sequence: bytes) -> list[bytes]:
    return [sequence[i : i + tokens.TOKEN_BYTES] for i in range(0, len(sequence), tokens.TOKEN_BYTES)]


@given(TEXT, TEXT)
def test_equal_tokens_mean_equal_text(one, other):
    assert (tokens.encode(one) == tokens.encode(other)) == (one == other)


@given(TEXT)
def test_four_bytes_make_a_token(text):
    size = len(text.encode("utf-8", "surrogatepass"))
    assert tokens.count(tokens.encode(text)) == -(-size // 4)
    assert len(tokens.encode(text)) % tokens.TOKEN_BYTES == 0


@given(TEXT)
def test_no_text_fakes_a_special_token(text):
    assert SPECIALS.isdisjoint(split(tokens.encode(text)))


@given(IDS)
def test_ids_there_and_back(ids):
    assert tokens.to_ids(tokens.from_ids(ids)) == ids


@given(IDS, IDS, st.integers(1, 20))
def test_chains_share_the_blocks_that_prompts_share(one, other, block_size):
    chains = [tokens.chain(tokens.from_ids(ids), block_size) for ids in (one, other)]
    common = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    shared = common // block_size
    assert chains[0][:shared] == chains[1][:shared]
    assert set(chains[0][shared:]).isdisjoint(chains[1][shared:])
    assert len(chains[0]) == len(one) // block_size


@given(IDS.filter(lambda ids: len(ids) >= 4))
def test_a_seed_separates_whole_chains(ids):
    sequence = tokens.from_ids(ids)
    chains = [set(tokens.chain(sequence, 4, tokens.scope_seed("model", salt))) for salt in ("a", "b")]
    assert chains[0].isdisjoint(chains[1])


def test_scope_parts_do_not_run_together():
    assert tokens.scope_seed("ab", "c") != tokens.scope_seed("a", "bc")
    assert tokens.scope_seed("", "") == 0


@given(st.binary(max_size=64), st.integers(1, 20_000), st.integers(1, 500))
def test_answers_are_deterministic_ascii_words(prompt, length, shorter):
    answer = tokens.generate(prompt, length)
    assert tokens.count(answer) == length
    assert answer == tokens.encode(answer.decode("ascii"))
    assert answer.replace(b" ", b"").isalpha()
    assert tokens.generate(prompt, min(shorter, length)) == answer[: min(shorter, length) * 4]


def test_variants_of_an_answer_differ():
    answers = {tokens.generate(b"prompt", 50, variant) for variant in range(20)}
    assert len(answers) == 20
