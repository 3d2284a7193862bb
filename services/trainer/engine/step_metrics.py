"""What a step tells of its tokens and of its time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from services.trainer.engine.schedule import TokenRecord
from services.trainer.engine.tokens import ResponseTokens
from services.trainer.loss.divergence import kl_k3
from services.trainer.loss.drift import drift_metrics
from shared.spans import span

Progress = Callable[[str, int], None]
"""Called with a phase and a step."""


def token_metrics(
    record: TokenRecord,
    tokens: ResponseTokens,
    old: Tensor | None,
    reference: Tensor | None,
    *,
    supervised: bool,
) -> dict[str, float]:
    """Means over the usable response tokens, and the drift between sampler and trainer."""
    usable = tokens.usable
    if supervised:  # nobody sampled them
        entropy = float(record.entropy[usable].mean())
        return {"entropy": entropy, "response_tokens": len(usable)}
    weights = record.weights[usable]
    before = record.logprobs if old is None else old
    kl = {} if reference is None else {"reference_kl": kl_k3(before, reference)[usable].mean()}
    return {
        **drift_metrics(before, tokens.sampler, usable),
        **{name: float(value) for name, value in kl.items()},
        "entropy": float(record.entropy[usable].mean()),
        "clip_share": float(record.clipped[usable].float().mean()),
        "tis_weight_mean": float(weights.mean()),
        "tis_truncated_share": float(record.corrected[usable].float().mean()),
        "bad_logprobs": tokens.num_unusable,
        "bad_logprob_share": tokens.num_unusable / len(usable),
        "response_tokens": len(usable),
    }


class Clock:
    """Seconds by phase; entering a phase is reported as progress."""

    def __init__(self, progress: Progress, step: int) -> None:
        self.seconds = {"logprobs": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        self._progress, self._step = progress, step

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._progress(phase, self._step)
        began_s = time.perf_counter()
        with span(phase, "phases"):
            yield
        self.seconds[phase] += time.perf_counter() - began_s
