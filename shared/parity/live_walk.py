"""The layer walk between a trainer and a sampler that are running, whoever carries the requests.

The trainer computes as its sampler does (rounded alike) and names its states; the sampler gets the
trainer's streams before each layer, so that what a block departs by is its own. Large models are
walked some points at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture
from shared.models.deepseek_v4.names import trace_points
from shared.parity.judge import Margin, RowJudge
from shared.parity.offline_request import WalkResult
from shared.parity.trace import (
    MAX_STATE_BYTES,
    MAX_TRACE_TOKENS,
    StateArray,
    Traced,
    TraceRequest,
    arrays,
    split_point,
    stream_name,
)
from shared.parity.walk import Walk, walk

Ask = Callable[[TraceRequest], Awaitable[Traced]]


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
    """Walk `tokens`, as many as an answer holds; the trainer says which version, unless one is
    given. ValueError for answers that are not of these tokens."""
    ids, version, found = np.array(tokens[: _most_tokens(arch)], np.int32), policy_version, []
    judge = RowJudge(arch, margin)
    for names in _parts(arch, len(ids)):
        layers = _layers_of(names, arch)
        entering = [stream_name(layer) for layer in range(*layers)]
        entering += [stream_name(layers[1])] if layers[1] == arch.num_hidden_layers else []
        asked = TraceRequest(
            sequences=[ids],
            # The streams that enter the first layer leave the one before it.
            layers=(max(layers[0] - 1, 0), layers[1]),
            points=[*dict.fromkeys([*names, *entering])],
            rounding="sampler",
            policy_version=version,
        )
        theirs = await trainer(asked)
        version = theirs.policy_version
        asked = TraceRequest(
            sequences=[ids],
            layers=layers,
            points=names,
            policy_version=version,
            streams=[{name: _only(theirs)[name] for name in entering}],
        )
        ours = await sampler(asked)
        states = (arrays(_only(ours)), arrays(_only(theirs)))
        found.append(await asyncio.to_thread(walk, *states, arch, judge=judge, names=names))
    assert version is not None
    walked = WalkResult.of(_joined(found, margin), mode="isolated", num_tokens=len(ids))
    return LiveWalk(version, walked)


def _only(traced: Traced) -> dict[str, StateArray]:
    if len(traced.states) != 1:
        raise ValueError(f"expected the states of 1 sequence, found those of {len(traced.states)}")
    return traced.states[0]


def _parts(arch: Architecture, num_tokens: int) -> list[list[str]]:
    """All points in order, as many together as an answer may hold with half of it to spare: a part
    comes with two streams that are not of it."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name in trace_points(arch):
        size = 4 * num_tokens * _width(name, arch)
        if parts[-1] and filled + size > MAX_STATE_BYTES // 2:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def _most_tokens(arch: Architecture) -> int:
    """Of which the widest point still fits."""
    widest = max(_width(name, arch) for name in trace_points(arch))
    return MAX_STATE_BYTES // 2 // (4 * widest)


def _width(name: str, arch: Architecture) -> int:
    """Numbers of one token at a point, at most."""
    part = split_point(name)[1]
    if part in ("attn.q", "attn.core"):
        return arch.num_attention_heads * arch.head_dim
    widths = {
        "embed": arch.hc_mult * arch.hidden_size,
        "attn.kv": arch.head_dim,
        "attn.compressor": arch.head_dim,
        "attn.indexer.scores": MAX_TRACE_TOKENS // C4_RATIO,
        "attn.indexer": MAX_TRACE_TOKENS // C4_RATIO,
        "router": arch.n_routed_experts,
        "logits": arch.vocab_size,
    }
    for side in ("hc_attn", "hc_ffn"):
        widths |= {f"{side}.post": arch.hc_mult, f"{side}.comb": arch.hc_mult**2}
        widths[f"{side}.merge"] = arch.hc_mult * arch.hidden_size
    return widths.get(part, arch.hidden_size)


def _layers_of(names: Sequence[str], arch: Architecture) -> tuple[int, int]:
    """The first layer that the points need, and one past the last."""
    inner = {layer for name in names if (layer := split_point(name)[0]) is not None}
    inner |= {0} if "embed" in names else set()
    inner |= {arch.num_hidden_layers - 1} if "logits" in names or not inner else set()
    return min(inner), max(inner) + 1


def _joined(parts: Sequence[Walk], margin: Margin) -> Walk:
    departed = next((part for part in parts if part.first is not None), parts[0])
    return Walk(
        tuple(point for part in parts for point in part.points),
        tuple(name for part in parts for name in part.missing),
        margin.tolerance,
        departed.first,
        departed.suspects,
        margin.row_share,
    )
