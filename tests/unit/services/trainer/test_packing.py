"""Packing covers every response token once, within the budget, in a fixed order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.packing import (
    ScoredSequence,
    context_part,
    pack,
    plan_rows,
    share_out,
)
from shared.models.deepseek_v4.layout import ROW_ALIGNMENT


def sequence(prompt: int, response: int, *, seed: int = 0) -> ScoredSequence:
    ids = np.random.default_rng(seed).integers(1, 1000, prompt + response)
    return ScoredSequence(ids, prompt)


def test_longest_first_ties_by_index() -> None:
    assert plan_rows({0: 3, 1: 16, 2: 9, 3: 9}, max_tokens=32) == [[1, 2], [3, 0]]


def test_rows_by_hand() -> None:
    short = ScoredSequence(np.array([7, 8, 9]), 2)
    long = ScoredSequence(np.arange(10, 19), 5)
    ((micro,),) = pack([short, long], max_tokens=64)
    assert micro.token_ids.shape == (2, 16)
    assert micro.token_ids[0].tolist() == [*range(10, 19), *[0] * 7]
    assert micro.token_ids[1].tolist() == [7, 8, 9, *[0] * 13]
    assert micro.positions.tolist() == [4, 5, 6, 7, 16 + 1]
    assert micro.labels.tolist() == [15, 16, 17, 18, 9]
    assert micro.places.tolist() == [1, 2, 3, 4, 0]


def test_sequences_without_response_take_no_row() -> None:
    assert pack([sequence(5, 0)], max_tokens=64) == [[]]
    ((micro,),) = pack([sequence(5, 0), sequence(5, 2)], max_tokens=64)
    assert micro.token_ids.shape[0] == 1
    assert micro.places.tolist() == [0, 1]


def test_too_long_a_sequence_names_the_budget() -> None:
    with pytest.raises(ValueError, match=r"65 tokens \(72 padded\) exceeds the budget of 64"):
        pack([sequence(60, 5)], max_tokens=64)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=30),
    st.integers(40, 200),
)
def test_every_token_is_packed_once(shapes: list[tuple[int, int]], budget: int) -> None:
    sequences = [sequence(p, r, seed=i) for i, (p, r) in enumerate(shapes)]
    flat = np.concatenate(
        [np.zeros(0, int), *(s.token_ids[s.num_prompt_tokens :] for s in sequences)]
    )
    places = []
    for micro in pack(sequences, max_tokens=budget)[0]:
        rows, width = micro.token_ids.shape
        assert rows * width <= budget
        assert width % ROW_ALIGNMENT == 0
        assert np.array_equal(flat[micro.places], micro.labels)
        row, token = np.divmod(micro.positions, width)
        assert np.array_equal(micro.token_ids[row, token + 1], micro.labels)
        places += micro.places.tolist()
    assert sorted(places) == list(range(len(flat)))


def test_packing_is_deterministic() -> None:
    sequences = [sequence(3 + i % 4, 5 + i % 7, seed=i) for i in range(20)]
    first, second = (pack(sequences, max_tokens=64)[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.places, other.places)


def test_ranks_get_equal_work_of_log_normal_lengths() -> None:
    rng = np.random.default_rng(5)
    drawn = np.exp(rng.normal(6.0, 1.0, 256)).astype(int).clip(1, 8192)
    lengths = dict(enumerate(drawn.tolist()))
    shares = share_out(lengths, num_ranks=4)
    assert sorted(index for share in shares for index in share) == list(lengths)
    work = [
        sum(-(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT for length in s.values()) for s in shares
    ]
    assert max(work) / min(work) < 1.05


def test_ranks_have_equally_many_micro_batches_and_share_all_tokens() -> None:
    sequences = [sequence(3, 5, seed=1), sequence(2, 30, seed=2), sequence(4, 4, seed=3)]
    shares = pack(sequences, max_tokens=32, num_ranks=2)
    assert [len(share) for share in shares] == [1, 1]
    places = [micro.places for share in shares for micro in share]
    assert sorted(np.concatenate(places)) == list(range(39))

    alone = pack(sequences[:1], max_tokens=32, num_ranks=2)
    assert alone[1][0].token_ids.shape == (1, ROW_ALIGNMENT)
    assert len(alone[1][0].places) == 0


def test_context_ranks_hold_consecutive_parts_of_rows() -> None:
    ((micro,),) = pack([sequence(3, 10), sequence(2, 4, seed=1)], max_tokens=64)
    parts = [context_part(micro, rank, 2) for rank in range(2)]
    assert np.array_equal(np.concatenate([part.token_ids for part in parts], 1), micro.token_ids)
    found = {}
    for micro_part in parts:
        assert micro_part.part is not None
        row, token = np.divmod(micro_part.positions, micro_part.token_ids.shape[1])
        whole = row * micro_part.part.width + micro_part.part.first + token
        scored = zip(whole, micro_part.labels, strict=True)
        found |= dict(zip(micro_part.part.scored.tolist(), scored, strict=True))
        assert np.array_equal(micro_part.places, micro.places)
    expected = zip(micro.positions, micro.labels, strict=True)
    assert found == dict(enumerate(expected))
