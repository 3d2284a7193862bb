"""The offline comparison of two checkpoints: what it reports, what it refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.models.deepseek_v4.checkpoint import write_release
from shared.parity.offline import run
from shared.parity.offline_request import OfflineRequest, Side
from tests.parity.engines import case, reference_logits
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

SEQUENCES = [
    *random_tokens(SMALL, rows=2, length=150).tolist(),
    random_tokens(SMALL, rows=1, length=40, seed=2)[0].tolist(),
]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`right`, and next to it the same model with one mistake each."""
    folder = tmp_path_factory.mktemp("releases")
    weights = random_weights(SMALL, seed=11)
    write_release(folder / "right", SMALL, weights)
    sink = {"layers.2.attn.attn_sink": torch.zeros(SMALL.num_attention_heads)}
    write_release(folder / "sink", SMALL, weights | sink)
    write_release(folder / "window", replace(SMALL, sliding_window=12), weights)
    write_release(folder / "words", replace(SMALL, vocab_size=520), _more_words(weights))
    return folder


def _more_words(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    longer = ("embed.weight", "head.weight", "tid2eid")
    return {
        name: torch.cat((value, value[:8])) if name.endswith(longer) else value
        for name, value in weights.items()
    }


def request(folder: Path, theirs: str, **changes: object) -> OfflineRequest:
    sides = {"ours": Side(path=folder / "right"), "theirs": Side.parse(f"{folder / theirs}")}
    return OfflineRequest(**{**sides, "sequences": SEQUENCES, **changes})  # type: ignore[arg-type]


def test_a_checkpoint_agrees_with_itself_and_with_transformers(releases: Path) -> None:
    found = run(request(releases, "right", walk="chained"))
    assert found.ours == found.theirs
    assert (found.argmax_agreement, set(found.routing_agreement.values())) == (1, {1})
    assert found.walk is not None
    assert found.walk.first is None
    assert [len(values) for values in found.ours] == [149, 149, 39]
    known = case("small", rows=1, seed=11)
    theirs = known.logits[0, :-1].log_softmax(-1).gather(1, known.tokens[0, 1:, None])
    alone = run(request(releases, "right", sequences=known.tokens.tolist()))
    assert np.abs(np.array(alone.ours[0]) - theirs[:, 0].numpy()).max() < 1e-4


@pytest.mark.parametrize("mode", ["chained", "isolated"])
def test_walk_names_what_differs(releases: Path, mode: str) -> None:
    found = run(request(releases, "sink", walk=mode))
    assert found.walk is not None
    assert found.walk.first == "layer 2 · attention core"
    assert found.walk.num_tokens == 150
    assert 0 < found.argmax_agreement < 1
    assert found.routing_agreement[0] == found.routing_agreement[2] == 1  # hash routed
    departed = {p.label.split(" · ")[0] for p in found.walk.points if p.departure > 1e-4}
    if mode == "isolated":
        assert departed == {"layer 2"}
    else:
        assert {"layer 2", "layer 3", "layer 4", "output head"} <= departed


def test_rounding_is_part_of_a_side(releases: Path) -> None:
    found = run(request(releases, "right@served", walk="isolated", tolerance=1e-3))
    assert found.walk is not None
    assert found.walk.first == "layer 0 · query projection and RoPE"
    assert found.ours != found.theirs


def test_other_models_are_compared_but_not_walked(releases: Path) -> None:
    found = run(request(releases, "window", walk="chained"))
    assert found.walk is None
    assert found.notes == ["no layer walk: the models differ in sliding_window"]
    assert found.ours != found.theirs


def test_temperature_divides_the_logits(releases: Path) -> None:
    warm = run(request(releases, "right", temperature=2.0)).ours[0]
    known = torch.tensor([SEQUENCES[0]])
    logits = reference_logits(SMALL, random_weights(SMALL, seed=11), known)[0, :-1] / 2
    expected = logits.log_softmax(-1).gather(1, known[0, 1:, None])[:, 0]
    assert np.abs(np.array(warm) - expected.numpy()).max() < 1e-4


def test_wrong_requests_are_refused(releases: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size differs \(512 and 520\)"):
        run(request(releases, "words"))
    with pytest.raises(ValueError, match="sequence 0: token 512 is outside of the 512 known"):
        run(request(releases, "right", sequences=[[1, 512]]))
    with pytest.raises(ValueError, match="sequence 1 has fewer than 2 tokens"):
        request(releases, "right", sequences=[[1, 2], [1]])
    with pytest.raises(ValueError, match="either sequences or prompts"):
        request(releases, "right", prompts=["a"])
    with pytest.raises(ValueError, match="rounding 'fp4' is not plain, served or release"):
        Side.parse("some/where@fp4")
    with pytest.raises(OSError, match=r"No such file.*nowhere"):
        run(request(releases, "nowhere"))


def test_side_is_read_with_and_without_a_rounding() -> None:
    assert Side.parse("a/b@served") == Side(path=Path("a/b"), rounding="served")
    assert Side.parse("a@x/b") == Side(path=Path("a@x/b"))
    assert str(Side.parse("a/b")) == "a/b@plain"
