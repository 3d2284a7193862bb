"""The layer walk between a trainer and a sampler that are running, whoever carries the requests.

The trainer computes as its sampler does (rounded alike) and names its states; the sampler gets the
trainer's streams before each layer, so that what a block departs by is its own. Large models are
walked a few layers at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import trace_points
from shared.parity.offline_request import WalkResult
from shared.parity.trace import (
    MAX_STATE_BYTES,
    Traced,
    TraceRequest,
    arrays,
    split_point,
    stream_name,
)
from shared.parity.walk import Walk, walk

Ask = Callable[[TraceRequest], Awaitable[Traced]]


@dataclass(frozen=True, slots=True)
class Margin:
    """A point departs when more than `row_share` of its rows do by more than `tolerance`, or when
    more than `choice_share` of them choose otherwise; `finer` as in `walk`."""

    tolerance: float
    row_share: float
    choice_share: float
    finer: Mapping[str, tuple[float, float]] = field(default_factory=dict)


_BF16_FINER = {
    "hc_attn.post": (1e-3, 0.25),
    "hc_attn.comb": (1e-3, 0.25),
    ".merge": (0.05, 0.35),
}
MARGINS = {
    "float32": Margin(1e-4, 0.1, 0.03),
    "bfloat16": Margin(0.1, 0.3, 0.5, _BF16_FINER),
}
"""By the trainer's dtype, within one block that is given equal streams. A sum in another order
flips a rounded code now and then: up to 5 % of rows in FP32. In BF16 up to 31 % of rows choose
another entry, which moves 24 % of an attention core's rows; coefficients before attention are FP32
on equal streams there, and equal, and at most 18 % of a merge's rows depart by 0.05."""


@dataclass(frozen=True, slots=True)
class LiveWalk:
    """Both sides answered for `policy_version`."""

    policy_version: int
    result: WalkResult


async def walk_sides(
    trainer: Ask,
    sampler: Ask,
    arch: Architecture,
    tokens: Sequence[int],
    *,
    margin: Margin,
    policy_version: int | None = None,
) -> LiveWalk:
    """Walk `tokens`; the trainer says which version, unless one is given."""
    ids, version, found = np.array(tokens, np.int32), policy_version, []
    for layers in _layer_spans(arch, len(ids)):
        # The streams that enter the first layer leave the one before it.
        before = (max(layers[0] - 1, 0), layers[1])
        asked = TraceRequest(
            sequences=[ids], layers=before, rounding="sampler", policy_version=version
        )
        theirs = await trainer(asked)
        version = theirs.policy_version
        entering = [stream_name(layer) for layer in range(layers[0], layers[1] + 1)]
        asked = TraceRequest(
            sequences=[ids],
            layers=layers,
            policy_version=version,
            streams=[{name: theirs.states[0][name] for name in entering}],
        )
        ours = await sampler(asked)
        states = (arrays(ours.states[0]), arrays(theirs.states[0]))
        names = [name for name in trace_points(arch) if _is_within(name, layers, arch)]
        found.append(
            await asyncio.to_thread(
                walk,
                *states,
                arch,
                tolerance=margin.tolerance,
                row_share=margin.row_share,
                choice_share=margin.choice_share,
                finer=margin.finer,
                names=names,
            )
        )
    assert version is not None
    walked = WalkResult.of(_joined(found), mode="isolated", num_tokens=len(ids))
    return LiveWalk(version, walked)


def _layer_spans(arch: Architecture, num_tokens: int) -> Iterator[tuple[int, int]]:
    """As many layers at once as an answer may hold, with half of it to spare."""
    width = arch.num_attention_heads * arch.head_dim
    by_token = 2 * width + arch.head_dim + (2 * arch.hc_mult + 9) * arch.hidden_size
    by_layer = 4 * num_tokens * (by_token + 2 * (arch.hc_mult + 1) ** 2 + arch.n_routed_experts)
    head = 4 * num_tokens * (arch.vocab_size + 2 * arch.hidden_size)
    step = max(1, (MAX_STATE_BYTES // 2 - head) // by_layer)
    last = arch.num_hidden_layers
    return ((first, min(first + step, last)) for first in range(0, last, step))


def _is_within(name: str, layers: tuple[int, int], arch: Architecture) -> bool:
    layer, part = split_point(name)
    if layer is not None:
        return layers[0] <= layer < layers[1]
    return layers[0] == 0 if part == "embed" else layers[1] == arch.num_hidden_layers


def _joined(parts: Sequence[Walk]) -> Walk:
    departed = next((part for part in parts if part.first is not None), parts[0])
    return Walk(
        tuple(point for part in parts for point in part.points),
        tuple(name for part in parts for name in part.missing),
        parts[0].tolerance,
        departed.first,
        departed.suspects,
        parts[0].row_share,
    )
