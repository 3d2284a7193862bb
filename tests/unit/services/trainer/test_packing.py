"""Packing covers every response token once, within the budget, in a fixed order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.packing import (
    MicroBatch,
    ScoredSequence,
    Slab,
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
    assert plan_rows({0: 3, 1: 16, 2: 9, 3: 9}, max_tokens=32) == [[[1, 2]], [[3], [0]]]


def test_rows_of_a_slab_are_nearly_as_wide_as_it() -> None:
    lengths = {0: 64, 1: 56, 2: 48, 3: 20, 4: 20}
    assert plan_rows(lengths, max_tokens=1000) == [[[0, 1], [2], [3, 4]]]
    # 64 + 64 + 48 leave no room for 24 of 180, the next micro-batch has it
    assert plan_rows(lengths, max_tokens=180) == [[[0, 1], [2]], [[3, 4]]]


def test_rows_by_hand() -> None:
    short = ScoredSequence(np.array([7, 8, 9]), 2)
    long = ScoredSequence(np.arange(10, 19), 5)
    ((micro,),) = pack([short, long], max_tokens=64)
    wide, narrow = (slab.token_ids for slab in micro.slabs)
    assert wide.tolist() == [[*range(10, 19), *[0] * 7]]
    assert narrow.tolist() == [[7, 8, 9, *[0] * 5]]
    assert micro.positions.tolist() == [4, 5, 6, 7, 16 + 1]
    assert micro.labels.tolist() == [15, 16, 17, 18, 9]
    assert micro.places.tolist() == [1, 2, 3, 4, 0]


def test_sequences_without_response_take_no_row() -> None:
    assert pack([sequence(5, 0)], max_tokens=64) == [[]]
    ((micro,),) = pack([sequence(5, 0), sequence(5, 2)], max_tokens=64)
    assert micro.num_tokens == 8
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
        assert micro.num_tokens <= budget
        assert all(slab.width % ROW_ALIGNMENT == 0 for slab in micro.slabs)
        assert np.array_equal(flat[micro.places], micro.labels)
        ids = np.concatenate([slab.token_ids.ravel() for slab in micro.slabs])
        assert np.array_equal(ids[micro.positions + 1], micro.labels)
        places += micro.places.tolist()
    assert sorted(places) == list(range(len(flat)))


def test_packing_is_deterministic() -> None:
    sequences = [sequence(3 + i % 4, 5 + i % 7, seed=i) for i in range(20)]
    first, second = (pack(sequences, max_tokens=64)[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for slab, same in zip(one.slabs, other.slabs, strict=True):
            assert np.array_equal(slab.token_ids, same.token_ids)
        assert np.array_equal(one.places, other.places)


def work_of_ranks(seed: int, *, num_ranks: int) -> tuple[list[int], int]:
    """Padded tokens of each rank, of 256 log-normal lengths, and of the longest sequence."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(6.0, 1.0, 256)).astype(int).clip(1, 8192)
    lengths = dict(enumerate(drawn.tolist()))
    shares = share_out(lengths, num_ranks=num_ranks)
    assert sorted(index for share in shares for index in share) == list(lengths)
    padded = [[-(-one // ROW_ALIGNMENT) * ROW_ALIGNMENT for one in s.values()] for s in shares]
    return [sum(share) for share in padded], max(map(max, padded))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_get_equal_work_of_log_normal_lengths(seed: int) -> None:
    work, _ = work_of_ranks(seed, num_ranks=4)
    assert max(work) / min(work) < 1.05


def test_equal_work_ends_where_one_sequence_is_more_than_a_rank_s_share() -> None:
    """Sequences are not cut: of eight a rank, the longest may be all that its rank has."""
    spreads = []
    for seed in range(10):
        work, longest = work_of_ranks(seed, num_ranks=32)
        assert max(work) <= np.mean(work) + longest
        if longest > np.mean(work):
            assert max(work) == longest
        spreads.append(max(work) / min(work) - 1)
    assert 0.2 < np.mean(spreads) < 0.4


def test_ranks_have_equally_many_micro_batches_and_share_all_tokens() -> None:
    sequences = [sequence(3, 5, seed=1), sequence(2, 30, seed=2), sequence(4, 4, seed=3)]
    shares = pack(sequences, max_tokens=32, num_ranks=2)
    assert [len(share) for share in shares] == [1, 1]
    places = [micro.places for share in shares for micro in share]
    assert sorted(np.concatenate(places)) == list(range(39))

    alone = pack(sequences[:1], max_tokens=32, num_ranks=2)
    assert alone[1][0].num_tokens == ROW_ALIGNMENT
    assert len(alone[1][0].places) == 0


def test_context_ranks_hold_consecutive_parts_of_rows() -> None:
    shapes = ((3, 40), (2, 4), (2, 37))
    sequences = [sequence(*shape, seed=i) for i, shape in enumerate(shapes)]
    ((micro,),) = pack(sequences, max_tokens=200, alignment=16)
    assert [slab.token_ids.shape for slab in micro.slabs] == [(2, 48), (1, 16)]
    parts = [context_part(micro, rank, 2) for rank in range(2)]
    found: dict[int, int] = {}
    for part in parts:
        assert part.scored is not None
        assert np.array_equal(part.places, micro.places)
        at = np.concatenate([_places_in(slab, micro, i) for i, slab in enumerate(part.slabs)])
        assert np.array_equal(at[part.positions], micro.positions[part.scored])
        assert np.array_equal(part.labels, micro.labels[part.scored])
        found |= dict.fromkeys(part.scored.tolist(), 1)
    assert sorted(found) == list(range(len(micro.places)))


def _places_in(slab: Slab, micro: MicroBatch, number: int) -> np.ndarray:
    """Flat positions in the whole micro-batch of the tokens of a part of its `number`-th slab."""
    start = sum(one.token_ids.size for one in micro.slabs[:number])
    rows, length = slab.token_ids.shape
    places = start + np.arange(rows)[:, None] * slab.width + slab.first + np.arange(length)
    whole = micro.slabs[number].token_ids[:, slab.first : slab.first + length]
    assert np.array_equal(slab.token_ids, whole)
    return places.ravel()


def test_little_of_log_normal_lengths_is_padding() -> None:
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(6.5, 0.8, 256)).astype(int).clip(32, 8192)
    sequences = [ScoredSequence(np.zeros(length, np.int64), length // 4) for length in drawn]
    for num_ranks in (1, 4):
        shares = pack(sequences, max_tokens=32768, num_ranks=num_ranks)
        work = [sum(micro.num_tokens for micro in share) for share in shares]
        assert drawn.sum() > 0.95 * sum(work)
        assert max(work) < 1.05 * min(work)
