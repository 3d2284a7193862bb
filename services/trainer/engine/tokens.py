"""A training batch as flat arrays over its response tokens: samples in order, tokens in order.

What can never become right is refused here, before the actor has been touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.trainer.engine.replay import sample_routes
from services.trainer.loss.advantages import token_advantages
from services.trainer.loss.aggregation import sample_of_token, usable_logprobs
from services.trainer.packing import ScoredSequence
from shared.errors import Rejected
from shared.job_actor import ReplaySection
from shared.job_algorithm import AlgorithmSection
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.architecture import Architecture


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """R response tokens of `sequences`; FP32 `[R]` unless said otherwise."""

    sequences: list[ScoredSequence]
    lengths: Tensor  # int64 [samples] response tokens of each
    sampler: Tensor
    usable: Tensor  # bool
    advantages: Tensor

    @property
    def sample(self) -> Tensor:
        """int64 `[R]`: the sample of each token."""
        return sample_of_token(self.lengths)

    @property
    def num_unusable(self) -> int:
        return int((~self.usable).sum())

    def part(self, index: int, of: int) -> tuple["ResponseTokens", Tensor]:
        """Every `of`-th sample from `index` on, and where its tokens are in the whole."""
        places = torch.nonzero(self.sample % of == index).squeeze(-1)
        part = ResponseTokens(
            self.sequences[index::of],
            self.lengths[index::of],
            self.sampler[places],
            self.usable[places],
            self.advantages[places],
        )
        return part, places


def response_tokens(
    batch: TrainingBatch, *, architecture: Architecture, max_bad_share: float, replay: ReplaySection
) -> ResponseTokens:
    """Raises `Rejected` for a batch without response tokens, a token id outside the vocabulary, an
    advantage that is no number, more than `max_bad_share` unusable sampler log-probabilities, or
    routes that cannot be replayed."""
    samples = [sample for sample in batch.samples if len(sample.sampler_logprobs)]
    if not samples:
        raise Rejected(f"step {batch.step}: no sample has a response token")
    _check_ids(samples, architecture.vocab_size)
    lengths = np.array([len(sample.sampler_logprobs) for sample in samples], np.int64)
    advantages = np.repeat([sample.advantage for sample in samples], lengths)
    if not np.isfinite(advantages).all():
        raise Rejected(f"step {batch.step}: an advantage is not finite")
    sampler = torch.from_numpy(np.concatenate([sample.sampler_logprobs for sample in samples]))
    usable = usable_logprobs(sampler)
    share = 1.0 - usable.double().mean().item()
    if share > max_bad_share:
        raise Rejected(
            f"step {batch.step}: {share:.1%} of the sampler's log-probabilities are unusable (NaN, "
            f"infinite or positive), max_bad_logprob_share is {max_bad_share:.1%}"
        )
    return ResponseTokens(
        [_sequence(sample, architecture, replay) for sample in samples],
        torch.from_numpy(lengths),
        sampler.clamp(max=0.0),
        usable,
        torch.from_numpy(advantages).float(),
    )


def less_kl(
    tokens: ResponseTokens, kl: Tensor, *, batch: TrainingBatch, algorithm: AlgorithmSection
) -> ResponseTokens:
    """With advantages anew, from rewards that each token's `kl` `[R]` is a cost of.

    Responses that have no token here count in baselines with what they earned, at no cost.
    """
    samples = [sample for sample in batch.samples if len(sample.sampler_logprobs)]
    earned = [(one.reward, one.group_id) for one in samples]
    earned += [(one.reward, one.group_id) for one in batch.untrained]
    costs = algorithm.kl.coefficient * kl.double().numpy()
    lengths = [*tokens.lengths.tolist(), *(0 for _ in batch.untrained)]
    ends = np.cumsum(lengths)[:-1]
    found = token_advantages(
        [reward for reward, _ in earned],
        [group for _, group in earned],
        np.split(costs, ends),
        usable=np.split(tokens.usable.numpy(), ends),
        algorithm=algorithm,
    )
    return replace(tokens, advantages=torch.from_numpy(found).float())


def scored_sequences(items: Sequence[tuple[np.ndarray, int]]) -> list[ScoredSequence]:
    return [ScoredSequence(np.asarray(ids, np.int64), prompt) for ids, prompt in items]


def _sequence(
    sample: TrainingSample, architecture: Architecture, replay: ReplaySection
) -> ScoredSequence:
    ids = np.asarray(sample.token_ids, np.int64)
    return ScoredSequence(
        ids, sample.num_prompt_tokens, sample_routes(sample, architecture, replay)
    )


def _check_ids(samples: list[TrainingSample], vocab_size: int) -> None:
    for sample in samples:
        low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise Rejected(
                f"{sample.rollout_id}: token id {bad} is outside the vocabulary of {vocab_size}"
            )
