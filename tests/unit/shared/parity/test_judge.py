"""Which departures of made-up states are a point's own; real flips and mistakes: tests/parity."""

from dataclasses import replace

import numpy as np
import pytest

from shared.parity.judge import Margin, RowJudge
from shared.parity.walk import Walk, walk
from tests.tiny_deepseek_v4 import SMALL

ARCH = replace(SMALL, sliding_window=8, index_topk=3)
TOKENS, ENTRIES = 64, 16
MARGIN = Margin(1e-4, 0.1, 0.03, 0.05)
LAYER = "layers.2.attn"  # overlapping blocks of 4 and an indexer
States = dict[str, np.ndarray]


def states() -> States:
    """64 tokens at what one attention with an indexer computes."""
    rng = np.random.default_rng(3)
    closed = (np.arange(TOKENS) + 1) // 4
    scores = rng.normal(size=(TOKENS, ENTRIES))
    scores[np.arange(ENTRIES) >= closed[:, None]] = -np.inf
    return {
        f"{LAYER}.norm": rng.normal(size=(TOKENS, 64)),
        f"{LAYER}.q": rng.normal(size=(TOKENS, 4, 16)),
        f"{LAYER}.kv": rng.normal(size=(TOKENS, 32)),
        f"{LAYER}.compressor": rng.normal(size=(ENTRIES, 32)),
        f"{LAYER}.indexer.scores": scores,
        f"{LAYER}.indexer": best_of(scores),
        f"{LAYER}.core": rng.normal(size=(TOKENS, 4, 16)),
        f"{LAYER}": rng.normal(size=(TOKENS, 64)),
    }


def best_of(scores: np.ndarray) -> np.ndarray:
    ranks = (-scores).argsort(-1).argsort(-1)
    return (ranks < ARCH.index_topk) & ~np.isneginf(scores)


def judged(wrong: States, right: States) -> Walk:
    return walk(wrong, right, ARCH, judge=RowJudge(ARCH, MARGIN))


def first(wrong: States, right: States) -> str | None:
    found = judged(wrong, right).first
    return None if found is None else found.name


def moved(right: States, point: str, rows: object, size: float = 0.01) -> States:
    name = f"{LAYER}.{point}" if point else LAYER
    value = right[name].copy()
    value[rows] += size * np.abs(value[np.isfinite(value)]).max()
    return right | {name: value}


def test_rows_that_see_a_flipped_key_are_no_fault_of_the_attention() -> None:
    right = states()
    flipped = moved(right, "kv", (20, 7))
    reached = moved(flipped, "core", slice(20, 28))  # an eighth of all rows
    assert first(moved(reached, "", slice(20, 28)), right) is None
    assert first(moved(right, "core", slice(20, 48)), right) == f"{LAYER}.core"
    # As many rows again, which see no key that flipped.
    assert first(moved(reached, "core", slice(28, 64, 2)), right) == f"{LAYER}.core"


def test_flipped_codes_of_two_entries_are_no_fault_of_the_compressor() -> None:
    """2 of 16 entries, one channel of 32 each; what selects them is reached."""
    right = states()
    flipped = moved(right, "compressor", ([6, 9], [3, 3]))
    assert first(flipped, right) is None
    reads = right[f"{LAYER}.indexer"][:, [6, 9]].any(1)
    assert first(moved(flipped, "core", reads), right) is None
    assert first(moved(right, "compressor", slice(None)), right) == f"{LAYER}.compressor"


def test_more_than_half_of_all_rows_is_too_much_whatever_reaches_them() -> None:
    right = states()
    flipped = moved(right, "kv", (slice(0, 64, 8), 7))
    assert first(moved(flipped, "core", slice(None)), right) is None
    assert first(moved(flipped, "core", slice(None), 0.1), right) == f"{LAYER}.core"


def test_every_entry_counts_the_same_whoever_scores_it() -> None:
    """Entry 0 is scored by 61 tokens, a ninth of all scores."""
    right = states()
    assert first(moved(right, "indexer.scores", (slice(None), 0)), right) is None
    everywhere = moved(right, "indexer.scores", slice(3, None))
    assert first(everywhere, right) == f"{LAYER}.indexer.scores"


def test_tokens_that_see_other_entries_depart_however_few() -> None:
    right = states()
    scores = right[f"{LAYER}.indexer.scores"].copy()
    scores[40, 2] = -np.inf
    assert first(right | {f"{LAYER}.indexer.scores": scores}, right) == f"{LAYER}.indexer.scores"


def test_choices_that_follow_each_sides_scores_are_no_fault_of_the_selection() -> None:
    right = states()
    noise = 0.02 * np.random.default_rng(4).normal(size=(TOKENS, ENTRIES))
    scores = right[f"{LAYER}.indexer.scores"] + noise
    near = right | {f"{LAYER}.indexer.scores": scores, f"{LAYER}.indexer": best_of(scores)}
    differ = (near[f"{LAYER}.indexer"] != right[f"{LAYER}.indexer"]).any(1)
    assert differ.mean() > 0.05
    coarse = replace(MARGIN, tolerance=0.1)
    assert walk(near, right, ARCH, judge=RowJudge(ARCH, coarse)).first is None
    wrong = right[f"{LAYER}.indexer"].copy()
    wrong[40:52] = np.roll(wrong[40:52], 1, axis=1)
    assert first(right | {f"{LAYER}.indexer": wrong}, right) == f"{LAYER}.indexer"


def test_choices_are_counted_among_rows_that_have_one() -> None:
    """The last 4 of 64 tokens see more entries than are kept."""
    few = replace(ARCH, index_topk=15)
    right = states()
    right[f"{LAYER}.indexer"] = ~np.isneginf(right[f"{LAYER}.indexer.scores"])
    right[f"{LAYER}.indexer"][63, 5] = False
    wrong = right[f"{LAYER}.indexer"].copy()
    wrong[63] = np.roll(wrong[63], 1)
    found = walk(right | {f"{LAYER}.indexer": wrong}, right, few, judge=RowJudge(few, MARGIN)).first
    assert found is not None
    assert found.name == f"{LAYER}.indexer"


def test_a_number_that_is_none_is_never_explained() -> None:
    right = states()
    flipped = moved(right, "kv", (slice(0, 64, 8), 7))
    core = flipped[f"{LAYER}.core"].copy()
    core[:32] = np.nan
    assert first(flipped | {f"{LAYER}.core": core}, right) == f"{LAYER}.core"


@pytest.mark.parametrize("layer", [0, 3])
def test_entries_are_seen_once_their_block_is_closed(layer: int) -> None:
    """Without an indexer; a window layer has none."""
    right = {
        name.replace("layers.2", f"layers.{layer}"): value
        for name, value in states().items()
        if "indexer" not in name and (layer == 3 or "compressor" not in name)
    }
    assert walk(right, right, ARCH, judge=RowJudge(ARCH, MARGIN)).first is None
