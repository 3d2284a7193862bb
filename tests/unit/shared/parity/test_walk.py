"""What the walk says of made-up states; that it finds real mistakes is tested in tests/parity."""

import numpy as np
import pytest

from shared.models.deepseek_v4.names import trace_points
from shared.parity.walk import label, routing_agreement, walk
from tests.tiny_deepseek_v4 import SMALL as ARCH

TOKENS = 6


def states(seed: int = 0) -> dict[str, np.ndarray]:
    """Six tokens of every point, in the reference's layout where the walk depends on it."""
    rng = np.random.default_rng(seed)
    made = {}
    for name in trace_points(ARCH):
        if name.endswith(".router"):
            ids = np.argsort(rng.random((TOKENS, ARCH.n_routed_experts)))[:, :2]
            made[name] = np.zeros((1, TOKENS, ARCH.n_routed_experts), np.float32)
            np.put_along_axis(made[name][0], ids, rng.random(ids.shape) + 0.1, 1)
        elif name.endswith(".indexer"):
            made[name] = rng.random((1, TOKENS, 9)) < 0.5
        elif name == "embed":
            rows = rng.normal(size=(1, TOKENS, 1, ARCH.hidden_size))
            made[name] = rows.repeat(ARCH.hc_mult, 2)
        elif name.endswith(("comb", "merge", "attn.q", "attn.core")):
            made[name] = rng.normal(size=(1, TOKENS, 4, 4))
        else:
            made[name] = rng.normal(size=(1, TOKENS, 5))
    return made


def test_equal_states_have_no_departure() -> None:
    found = walk(states(), states(), ARCH)
    assert (found.first, found.suspects, found.missing) == (None, (), ())
    assert [point.name for point in found.points] == trace_points(ARCH)
    assert "no departure above 0.0001 at 101 points" in found.verdict


def test_first_departure_in_order_of_computation_is_named() -> None:
    wrong = states()
    for name in ("layers.2.hc_ffn.merge", "layers.3.attn.core", "logits"):
        wrong[name] = wrong[name].copy()
        wrong[name].reshape(TOKENS, -1)[4] *= 1.5
    found = walk(wrong, states(), ARCH)
    assert found.first is not None
    assert (found.first.label, found.first.row) == ("layer 2 · mHC merge after experts", 4)
    assert found.suspects == ("layer 2 · mHC merge after experts",)
    assert sum(point.departure > 0 for point in found.points) == 3


def test_tolerance_is_a_share_of_the_largest_value() -> None:
    wrong = states()
    largest = np.abs(wrong["norm"]).max()
    wrong["norm"] = wrong["norm"] + 0.01 * largest
    assert walk(wrong, states(), ARCH, tolerance=0.011).first is None
    assert walk(wrong, states(), ARCH, tolerance=0.009).first is not None


def test_points_nobody_compared_are_suspects_until_they_are_read() -> None:
    wrong, right = states(), states()
    for name in ("hc_attn.comb", "attn.norm", "attn.compressor", "attn"):
        del wrong[f"layers.2.{name}"]
    wrong["layers.2.hc_attn.merge"] = wrong["layers.2.hc_attn.merge"] + 1
    assert walk(wrong, right, ARCH).suspects == (
        "layer 2 · mHC Sinkhorn before attention",  # only the merge reads it
        "layer 2 · attention output projection",
        "layer 2 · mHC merge after attention",
    )


def test_choices_depart_by_the_share_of_rows_that_differ() -> None:
    wrong = states()
    name = "layers.2.attn.indexer"
    wrong[name] = wrong[name].copy()
    wrong[name][0, [1, 3]] ^= True
    found = walk(wrong, states(), ARCH).first
    assert found is not None
    assert (found.label, found.row) == ("layer 2 · indexer", 1)
    assert found.departure == pytest.approx(2 / TOKENS)


def test_expert_ids_are_compared_with_dense_weights() -> None:
    ids, right = states(), states()
    name = "layers.4.router"
    ids[name] = np.stack([row.nonzero()[0][::-1] for row in right[name][0]])
    assert walk(ids, right, ARCH).first is None
    ids[name][2] = [0, 1] if 0 not in ids[name][2] else [7, 6]
    found = walk(ids, right, ARCH).first
    assert found is not None
    assert found.label == "layer 4 · router"
    assert routing_agreement(ids, right, ARCH)[4] == pytest.approx(5 / 6)
    assert routing_agreement(ids, right, ARCH)[3] == 1


def test_weights_of_the_router_stay_a_suspect_where_only_ids_are_known() -> None:
    ids, right = states(), states()
    ids["layers.0.router"] = np.stack([row.nonzero()[0] for row in right["layers.0.router"][0]])
    ids["layers.0.experts"] = ids["layers.0.experts"] * 2
    assert walk(ids, right, ARCH).suspects == ("layer 0 · router", "layer 0 · routed experts")


def test_embedding_may_be_given_once_per_token_or_per_stream() -> None:
    single = states()
    single["embed"] = single["embed"][0, :, 0]
    assert walk(single, states(), ARCH).first is None
    single["embed"] = single["embed"] + 1
    first = walk(single, states(), ARCH).first
    assert first is not None
    assert first.label == "embedding"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_departs(bad: float) -> None:
    wrong = states()
    wrong["layers.1.ffn"] = wrong["layers.1.ffn"].copy()
    wrong["layers.1.ffn"][0, 3] = bad
    first = walk(wrong, states(), ARCH).first
    assert first is not None
    assert (first.label, first.departure, first.row) == ("layer 1 · sum of experts", np.inf, 3)


def test_other_tokens_and_no_common_point_are_refused() -> None:
    shorter = states()
    shorter["norm"] = shorter["norm"][:, :-1]
    with pytest.raises(ValueError, match=r"norm: \(5, 5\) here, \(6, 5\) there"):
        walk(shorter, states(), ARCH)
    with pytest.raises(ValueError, match="no common point: 0 names here, 101 there"):
        walk({}, states(), ARCH)


def test_every_point_has_a_label() -> None:
    labels = [label(name) for name in trace_points(ARCH)]
    assert labels[0] == "embedding"
    assert "layer 3 · compressor" in labels
    assert labels[-1] == "output head"
