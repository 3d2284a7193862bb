"""The actor of one rank: model, optimiser and what the conductor may ask of them.

A step is refused (`Rejected`) with the weights as they were: bad tokens, too many unusable sampler
log-probabilities, a policy too far from the sampler's, a loss or gradient that is not a number.
What is refused after the step's first update is `LeftHalfway`: these weights are of no use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from megatron.core import parallel_state
from torch import Tensor

from services.trainer import checkpoint
from services.trainer.engine import schedule
from services.trainer.engine.agreement import together
from services.trainer.engine.attribution import Ladder, climb
from services.trainer.engine.initial import load_release_weights, served_policy
from services.trainer.engine.pass_rounding import PassRounding
from services.trainer.engine.reference import ReferencePolicy
from services.trainer.engine.share import own_share
from services.trainer.engine.step_metrics import Clock, Progress, token_metrics
from services.trainer.engine.tokens import (
    ResponseTokens,
    less_kl,
    response_tokens,
    scored_sequences,
)
from services.trainer.engine.tracing import has_whole_model, traced_states
from services.trainer.loss.aggregation import token_coefficients
from services.trainer.loss.divergence import kl_estimate
from services.trainer.loss.drift import drift_metrics
from services.trainer.loss.objective import TokenBatch
from services.trainer.megatron.optimizer import (
    build_optimizer,
    gradients_are_finite,
    set_learning_rate,
    wrap,
)
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.packing import ScoredSequence, num_guessed
from shared.errors import LeftHalfway, PartialModel, Rejected
from shared.job import Job, expand_path
from shared.job_actor import OptimizerSection, ReplaySection
from shared.job_algorithm import AlgorithmSection, CorrectionSection
from shared.messages import TrainingBatch, TrainingSample
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.layout import check_layout
from shared.parity.trace import StateArray, TraceRequest, TraceRounding

log = structlog.get_logger()
# The mean log-likelihood of given responses: REINFORCE with an advantage of 1 for each token.
SUPERVISED = AlgorithmSection(
    policy_loss="reinforce",
    baseline="none",
    normalise="none",
    aggregation="token_mean",
    correction=CorrectionSection(kind="none"),
)


class Actor:
    """`step` counts optimiser steps taken; `policy_version` is the version of the weights held."""

    def __init__(self, job: Job, *, progress: Progress = lambda phase, step: None) -> None:
        self.job = job
        self.step = 0
        self.policy_version = 0
        self._progress = progress
        self.rollout_checkpoint = expand_path(job.model.rollout_checkpoint)
        self.architecture = replace(
            Architecture.load(self.rollout_checkpoint),
            clamp_shared_experts=job.actor.clamp_shared_expert,
        )
        self.policy = served_policy(job, self.rollout_checkpoint)
        check_layout(job, self.architecture)
        self.layout = job.layout
        self.config = transformer_config(
            self.architecture, dtype=job.actor.dtype, layout=self.layout
        )
        stages = self.layout.stage_layers(self.architecture.num_hidden_layers)
        self.model = DeepSeekV4(
            self.config,
            self.architecture,
            layers=stages[parallel_state.get_pipeline_model_parallel_rank()],
            freeze_router=job.actor.freeze_router,
            train_mtp=job.actor.mtp_loss_weight > 0,
        )
        self.model.recompute(job.actor.recompute.mode, job.actor.recompute.num_blocks)
        self._rounding = PassRounding(job, self.model, self.policy)
        self._load_first_weights()
        self._reference: ReferencePolicy | None = None
        if job.algorithm.kl.coefficient and job.warm_up is None:
            self._reference = ReferencePolicy(self.model)
        # The optimiser copies its FP32 masters from the weights, so those come first.
        self.wrapped = wrap(self.model, self.config)
        self.optimizer = build_optimizer(self.wrapped, self.config, job.actor.optimizer)

    @property
    def num_parameters(self) -> int:
        """Of this rank."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train_step(self, batch: TrainingBatch, *, is_replay: bool = False) -> dict[str, Any]:
        """One step on `batch`: its metrics by name, `seconds` by phase, and `logprobs`, FP32 of all
        response tokens before the step.

        The batch is cut in `updates_per_batch` parts (sample i goes to part i modulo that), each
        with its own optimiser update and denominators. Log-probabilities of the actor at the start
        of the step cost a pass of their own only with several updates or a KL in the reward, and
        those of the reference one more. A replay, of a step that was taken once, is not refused for
        its drift: others trained on from it.
        """
        algorithm = SUPERVISED if batch.supervised else self.job.algorithm
        checks_drift = not (batch.supervised or is_replay)
        if algorithm.kl.coefficient and self._reference is None:
            self._take_reference()
        tokens = response_tokens(
            batch,
            architecture=self.architecture,
            max_bad_share=algorithm.max_bad_logprob_share,
            replay=ReplaySection() if batch.supervised else self.job.actor.replay,
        )
        clock = Clock(self._progress, batch.step)
        updates = min(algorithm.updates_per_batch, len(tokens.sequences))
        num_tokens = len(tokens.sampler)
        old: Tensor | None = None
        with clock("logprobs"):
            if updates > 1 or algorithm.kl_in_reward:
                old = self._score(tokens.sequences, batch.temperature).logprobs
                if checks_drift:
                    self._check_drift(old, tokens, batch.step)
            reference = None
            if algorithm.kl.coefficient:
                reference = self._score_reference(tokens.sequences, batch.temperature)
        if algorithm.kl_in_reward and old is not None and reference is not None:
            kl = kl_estimate(old, reference, algorithm.kl.estimator)
            tokens = less_kl(tokens, kl, batch=batch, algorithm=algorithm)
        record, results = schedule.TokenRecord.empty(num_tokens), []
        for update in range(updates):
            part, places = tokens.part(update, updates)
            before = _Scored(old, reference).at(places)
            checks_part = checks_drift and old is None
            result = self._update(
                part, before, batch, clock, first=update == 0, checks_drift=checks_part
            )
            record.put(places, result.record)
            results.append(result)
        self.step, self.policy_version = batch.step, batch.policy_version + 1
        return {
            **self._mtp_metrics(record, tokens),
            **token_metrics(record, tokens, old, reference, supervised=batch.supervised),
            "loss": sum(result.loss for result in results) / updates,
            "grad_norm": max(result.grad_norm for result in results),
            "learning_rate": results[-1].learning_rate,
            "micro_batches": sum(result.micro_batches for result in results),
            "padded_tokens": sum(result.padded_tokens for result in results),
            "seconds": clock.seconds,
            "logprobs": (record.logprobs if old is None else old).float().numpy().tobytes(),
        }

    def load_reference(self, path: Path) -> None:
        """Take the reference policy from a checkpoint; the weights held are that one's, too."""
        checkpoint.load_model(self.model, path)
        self._reference = ReferencePolicy(self.model)

    def score(
        self,
        sequences: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        rounding: TraceRounding = "own",
    ) -> list[np.ndarray]:
        """FP32 log-probabilities of tokens 1..T-1 of every sequence under the weights held.

        ValueError for a token id outside the vocabulary or a sequence beyond the token budget.
        """
        for ids in sequences:
            if (
                len(ids)
                and not 0 <= int(ids.min()) <= int(ids.max()) < self.architecture.vocab_size
            ):
                raise ValueError(
                    f"token ids {int(ids.min())}..{int(ids.max())} do not fit the vocabulary of "
                    f"{self.architecture.vocab_size}"
                )
        self._progress("score", self.step)
        scored = scored_sequences([(ids, min(1, len(ids))) for ids in sequences])
        values = self._score(scored, temperature, rounding).logprobs.numpy()
        ends = np.cumsum([sequence.num_scored for sequence in scored])
        return np.split(values, ends[:-1]) if scored else []

    def trace(self, request: TraceRequest) -> list[dict[str, StateArray]]:
        """Inner states of given sequences, computed as the request asks.

        `PartialModel` where this rank sees only a part of them.
        """
        if max(self.layout.tensor, self.layout.pipeline, self.layout.context) > 1:
            raise PartialModel(
                f"layers are walked on ranks that hold all of them, not on {self.layout}"
            )
        self._progress("trace", self.step)
        with self._rounding.of(request.rounding) as quant:
            return traced_states(self.model, request, quant)

    def climb(
        self,
        samples: Sequence[TrainingSample],
        *,
        temperature: float,
        folders: Mapping[int, Path],
    ) -> Ladder:
        """The samples' response tokens on every rung between this actor and its sampler."""
        self._progress("attribute", self.step)
        if not has_whole_model(self.model):
            raise PartialModel("drift is attributed where one rank has the whole model")

        def score(sequences: list[ScoredSequence], rounding: TraceRounding) -> np.ndarray:
            return self._score(sequences, temperature, rounding).logprobs.numpy()

        recorded = self.job.actor.replay
        rounded = partial(self._rounding.of, "sampler")
        return climb(
            self.model, samples, score, rounded=rounded, recorded=recorded, folders=folders
        )

    def _take_reference(self) -> None:
        """What the warm-up made, before anything else is learnt."""
        warm_up = self.job.warm_up
        if warm_up is None or self.step != warm_up.steps:
            raise RuntimeError(f"at step {self.step} the weights are not the reference policy's")
        self._reference = ReferencePolicy(self.model)

    def _load_first_weights(self) -> None:
        source = self.job.model.actor_checkpoint
        path = expand_path(source) if source else self.rollout_checkpoint
        if checkpoint.is_checkpoint(path):
            checkpoint.load_model(self.model, path)
        else:
            with together():
                load_release_weights(self.model, path)
        log.info("first_weights_loaded", path=str(path), parameters=self.num_parameters)

    def _score(
        self,
        sequences: list[ScoredSequence],
        temperature: float,
        rounding: TraceRounding = "own",
    ) -> schedule.TokenRecord:
        num_tokens = sum(sequence.num_scored for sequence in sequences)
        packed = own_share(sequences, self.job, self.architecture)
        with self._rounding.of(rounding) as quant:
            return schedule.score(
                self.model,
                packed.mine,
                self.architecture,
                num_tokens=num_tokens,
                temperature=temperature,
                quant=quant,
            )

    def _score_reference(
        self, sequences: list[ScoredSequence], temperature: float
    ) -> Tensor | None:
        if self._reference is None:
            return None
        with self._reference.in_place():
            return self._score(sequences, temperature).logprobs

    def _update(
        self,
        tokens: ResponseTokens,
        before: "_Scored",
        batch: TrainingBatch,
        clock: Clock,
        *,
        first: bool,
        checks_drift: bool,
    ) -> "_UpdateResult":
        """Gradients of `tokens`, then one optimiser update."""
        algorithm = SUPERVISED if batch.supervised else self.job.algorithm
        try:
            packed = own_share(tokens.sequences, self.job, self.architecture)
        except ValueError as err:
            raise _refusal(f"step {batch.step}: {err}", first=first) from err
        coefficients = token_coefficients(
            tokens.usable,
            tokens.lengths,
            algorithm.aggregation,
            max_tokens=self.job.sampling.max_response_tokens,
        )
        with clock("forward_backward"), self._rounding.of("own") as quant:
            self.model.share_embedding()
            self.wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss, record = schedule.forward_backward(
                self.wrapped,
                packed.mine,
                self.architecture,
                TokenBatch(
                    before.old,
                    tokens.sampler,
                    tokens.advantages,
                    coefficients,
                    tokens.sample,
                    before.reference,
                ),
                temperature=batch.temperature,
                algorithm=algorithm,
                quant=quant,
                mtp_coefficient=self._mtp_coefficient(tokens.sequences),
            )
        with clock("optimizer"):
            self._check_finite(loss, batch.step, first=first)
            if checks_drift:
                self._check_drift(record.logprobs, tokens, batch.step)
            settings = self._optimizer_settings(batch)
            learning_rate = set_learning_rate(self.optimizer, settings, batch.step)
            _, grad_norm, _ = self.optimizer.step()
        return _UpdateResult(
            loss,
            float(grad_norm),
            learning_rate,
            record,
            packed.micro_batches,
            packed.padded_tokens,
        )

    def _mtp_metrics(
        self, record: schedule.TokenRecord, tokens: ResponseTokens
    ) -> dict[str, float]:
        if not self.job.actor.mtp_loss_weight:
            return {}
        return {"mtp_loss": -float(record.mtp_logprobs.sum()) / self._num_guessed(tokens.sequences)}

    def _mtp_coefficient(self, sequences: list[ScoredSequence]) -> float:
        """The loss is `actor.mtp_loss_weight` times the mean over all guesses."""
        weight = self.job.actor.mtp_loss_weight
        return weight / self._num_guessed(sequences) if weight else 0.0

    def _num_guessed(self, sequences: list[ScoredSequence]) -> int:
        return max(1, num_guessed(sequences, self.architecture.num_nextn_predict_layers))

    def _optimizer_settings(self, batch: TrainingBatch) -> OptimizerSection:
        settings, warm_up = self.job.actor.optimizer, self.job.warm_up
        if not batch.supervised or warm_up is None or warm_up.learning_rate is None:
            return settings
        return settings.model_copy(update={"learning_rate": warm_up.learning_rate})

    def _check_drift(self, old: Tensor, tokens: ResponseTokens, step: int) -> None:
        bound = self.job.bounds.max_mean_abs_delta_logprob
        drift = drift_metrics(old, tokens.sampler, tokens.usable)["delta_logprob_mean"]
        if not drift <= bound:
            raise Rejected(
                f"step {step}: mean |delta log p| between sampler and trainer is {drift:.4g}, "
                f"above bounds.max_mean_abs_delta_logprob = {bound:g}; the weights are unchanged"
            )

    def _check_finite(self, loss: float, step: int, *, first: bool) -> None:
        if np.isfinite(loss) and gradients_are_finite(self.wrapped):
            return
        what = f"loss is {loss}" if not np.isfinite(loss) else "a gradient is not finite"
        raise _refusal(f"step {step}: {what}", first=first)


def _refusal(what: str, *, first: bool) -> Rejected:
    if first:
        return Rejected(f"{what}; the weights are unchanged")
    return LeftHalfway(
        f"{what} after the step's first update; the weights go back to those before the step"
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities `[R]` from before the step, as far as somebody needs them."""

    old: Tensor | None
    reference: Tensor | None

    def at(self, places: Tensor) -> "_Scored":
        return _Scored(
            None if self.old is None else self.old[places],
            None if self.reference is None else self.reference[places],
        )


@dataclass(frozen=True, slots=True)
class _UpdateResult:
    loss: float
    grad_norm: float
    learning_rate: float
    record: schedule.TokenRecord
    micro_batches: int
    padded_tokens: int
