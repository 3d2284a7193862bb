"""How a walk is cut into answers, by the widths of the release."""

from dataclasses import replace

import numpy as np
import pytest

from shared.models.deepseek_v4.names import trace_points
from shared.parity import live_walk, trace
from shared.parity.judge import MARGINS
from shared.parity.live_walk import walk_sides
from shared.parity.trace import MAX_STATE_BYTES, Recorder, Traced, TraceRequest
from tests.tiny_deepseek_v4 import FLASH

ARCH = replace(
    FLASH, num_hidden_layers=4, num_nextn_predict_layers=0, compress_ratios=(0, 4, 128, 4)
)


@pytest.mark.parametrize("num_tokens", [2, 64, 256])
def test_parts_of_the_release_fit_an_answer(num_tokens: int) -> None:
    parts = live_walk._parts(FLASH, num_tokens)
    assert [name for names in parts for name in names] == trace_points(FLASH)
    stream = FLASH.hc_mult * FLASH.hidden_size
    for names in parts:
        widths = sum(live_walk._width(name, FLASH) for name in names)
        assert 4 * num_tokens * (widths + 2 * stream) < MAX_STATE_BYTES
    assert num_tokens <= live_walk._most_tokens(FLASH) < 300  # 129,280 logits of each


class Side:
    """Has states of the right sizes at every point, all zero, and records what it is asked for."""

    def __init__(self) -> None:
        self.recorded: list[set[str]] = []

    async def __call__(self, request: TraceRequest) -> Traced:
        recorder = Recorder(request, ARCH)
        recorder.begin_sequence()
        for name in trace_points(ARCH):
            recorder(name, np.zeros(_shape(name, len(request.sequences[0])), np.float32))
        self.recorded.append(set(recorder.states[0]))
        return Traced(policy_version=3, states=recorder.states)


def _shape(name: str, num_tokens: int) -> tuple[int, ...]:
    width = live_walk._width(name, ARCH)
    if name == "embed" or name.endswith(".merge"):
        return num_tokens, ARCH.hc_mult, ARCH.hidden_size
    if name.endswith((".attn.q", ".attn.core")):
        return num_tokens, ARCH.num_attention_heads, ARCH.head_dim
    return (num_tokens, 2, 2) if name.endswith(".comb") else (num_tokens, width)


async def test_walk_at_the_release_s_widths_stays_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 256 tokens, by 4 tokens and a bound as much lower."""
    for module in (trace, live_walk):
        monkeypatch.setattr(module, "MAX_STATE_BYTES", MAX_STATE_BYTES * 4 // 256)
    trainer, sampler = Side(), Side()
    found = await walk_sides(trainer, sampler, ARCH, [1, 2, 3, 4], margin=MARGINS["float32"])
    assert [point.name for point in found.result.points] == trace_points(ARCH)
    assert sum("logits" in names for names in trainer.recorded) == 1
    assert len(sampler.recorded) > 4
    with pytest.raises(ValueError, match=r"the states exceed .*: ask for fewer"):
        await trainer(TraceRequest(sequences=[[1, 2, 3, 4]], layers=(0, 4)))


def test_points_outside_belong_to_the_first_and_the_last_layer() -> None:
    wanted = {}
    for layers in ((0, 1), (1, 3), (3, 4), (0, 4), None):
        recorder = Recorder(TraceRequest(sequences=[[1, 2]], layers=layers), ARCH)
        outer = ("embed", "hc_head.mix", "norm", "logits")
        wanted[layers] = [name for name in outer if recorder._is_wanted(name)]
    head = ["hc_head.mix", "norm", "logits"]
    whole = ["embed", *head]
    assert wanted == {(0, 1): ["embed"], (1, 3): [], (3, 4): head, (0, 4): whole, None: whole}


async def test_answer_of_no_sequence_is_named() -> None:
    async def empty(request: TraceRequest) -> Traced:
        return Traced(policy_version=3, states=[])

    with pytest.raises(ValueError, match="states of 1 sequence, found those of 0"):
        await walk_sides(Side(), empty, ARCH, [1, 2], margin=MARGINS["float32"])
