"""Beyond log-probabilities: which token each side likes best, whom its routers choose, where it
departs. Asks both sides for inner states; an engine that has none to show is told apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.judge import Margin
from shared.parity.live_walk import Ask, walk_sides
from shared.parity.offline_request import WalkResult
from shared.parity.trace import MAX_TRACE_SEQUENCES, MAX_TRACE_TOKENS, TraceRequest, arrays
from shared.parity.walk import routing_agreement

MAX_LOGIT_BYTES = 64 * 2**20  # of all compared sequences
MIN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of compared tokens: the same best token, and per layer the same experts."""

    policy_version: int
    num_sequences: int
    argmax: float
    routing: dict[int, float]


async def agreement(
    trainer: Ask, sampler: Ask, arch: Architecture, tokens: Sequence[Sequence[int]]
) -> Agreement:
    """Both sides on their own states, of as many sequences as an answer holds."""
    asked = _within_bounds(tokens, arch)
    theirs = await trainer(TraceRequest(sequences=asked, points=["router", "logits"]))
    version = theirs.policy_version
    ours = await sampler(
        TraceRequest(sequences=asked, points=["router", "logits"], policy_version=version)
    )
    same_best: list[np.ndarray] = []
    same_experts: dict[int, list[float]] = {}
    pairs = [(arrays(a), arrays(b)) for a, b in zip(ours.states, theirs.states, strict=True)]
    for mine, other in pairs:
        same_best.append(mine["logits"].argmax(-1) == other["logits"].argmax(-1))
        for layer, share in routing_agreement(mine, other, arch).items():
            same_experts.setdefault(layer, []).append(share)
    lengths = [len(sequence) for sequence in asked]
    return Agreement(
        policy_version=version,
        num_sequences=len(asked),
        argmax=float(np.concatenate(same_best).mean()),
        routing={
            layer: float(np.average(shares, weights=lengths))
            for layer, shares in same_experts.items()
        },
    )


async def longest_walk(
    trainer: Ask,
    sampler: Ask,
    arch: Architecture,
    tokens: Sequence[Sequence[int]],
    margin: Margin,
) -> tuple[int, WalkResult]:
    """Over the longest sequence: the version that both sides hold, and where they part."""
    walked = max(tokens, key=len)[:MAX_TRACE_TOKENS]
    found = await walk_sides(trainer, sampler, arch, walked, margin=margin)
    return found.policy_version, found.result


def _within_bounds(tokens: Sequence[Sequence[int]], arch: Architecture) -> list[np.ndarray]:
    taken: list[np.ndarray] = []
    room = MAX_LOGIT_BYTES // (4 * arch.vocab_size)
    for sequence in tokens[:MAX_TRACE_SEQUENCES]:
        ids = np.array(sequence[: min(MAX_TRACE_TOKENS, max(room, MIN_TOKENS))], np.int32)
        if taken and len(ids) > room:
            break
        room -= len(ids)
        taken.append(ids)
    return taken
