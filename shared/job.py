"""The job document: one strict schema for REST (JSON) and files (TOML); unknown keys are errors.

Every field does something; nothing is read past this schema. Token budgets are tokens, not bytes.
Its sections are in the `job_…` modules beside this one.
"""

import os
import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from shared.job_actor import ActorSection
from shared.job_algorithm import AlgorithmSection
from shared.job_cluster import ClusterSection, TrackingSection
from shared.job_data import DataSection, ModelSection
from shared.job_eval import EvalSection
from shared.job_proof import AttributionSection, BoundsSection, PreflightSection
from shared.job_reward import RewardSection
from shared.job_rollout import RolloutSection, UpdateSection
from shared.job_sampling import SamplingSection, truncation_warning
from shared.job_warm_up import WarmUpSection
from shared.parallel import Layout
from shared.section import Section

JOB_FILE = "job.json"  # of a run folder: the job, every default written out


class CheckpointSection(Section):
    """When checkpoints are written, and how many are kept."""

    every_steps: int = Field(10, gt=0)
    """Steps between checkpoints."""
    keep_last: int = Field(2, gt=0)
    """The newest ones are kept."""
    keep_every: int | None = Field(None, gt=0)
    """Checkpoints of steps that are multiples of this are kept for good."""
    background: bool = True
    """Copy the state to host memory and train on while it is written."""


class Job(Section):
    """One training run from its first weights to its report. Example: configs/demo.toml."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    """The job's id begins with it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of prompts, and of sampling."""
    steps: int = Field(gt=0)
    """Optimiser steps in all."""
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    """rollout_only samples, grades and records with the first weights; a step is then so many
    groups. train_only trains the steps of a recording, without samplers."""
    deterministic: bool | None = None
    """Take groups in draw order, whatever order they arrive in: the same job twice gives the same
    groups, metrics and weights. Needs `algorithm.max_lag = 0`, and follows from it if left out,
    unless `sampling.extra_samples` or `sampling.max_wait_s` makes steps depend on time."""
    record: bool = False
    """Keep every group that arrives, for `replay` and `explain`."""
    warm_up: WarmUpSection | None = None
    """Supervised first steps."""
    recording: str | None = None
    """Run folder with a recording; train_only needs it."""
    model: ModelSection
    """The checkpoints that it begins with."""
    data: DataSection
    """Where prompts come from."""
    sampling: SamplingSection
    """Groups, and how their completions are drawn."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """From rewards to a loss."""
    actor: ActorSection = ActorSection()
    """How the policy is trained, and spread over ranks."""
    rollout: RolloutSection = RolloutSection()
    """The samplers' engine."""
    update: UpdateSection = UpdateSection()
    """How new weights come to the samplers."""
    reward: RewardSection = RewardSection()
    """How completions are graded."""
    eval: EvalSection | None = None
    """Held-out problems; None: no evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When the training state is saved, and what is kept."""
    bounds: BoundsSection = BoundsSection()
    """When the job is paused."""
    preflight: PreflightSection = PreflightSection()
    """What is proved before the first step."""
    attribution: AttributionSection = AttributionSection()
    """Where the difference between sampler and trainer comes from."""
    cluster: ClusterSection = ClusterSection()
    """Machines and ranks."""
    tracking: TrackingSection = TrackingSection()
    """TensorBoard and Weights & Biases."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.sampling.max_response_tokens >= self.sampling.context_length:
            raise ValueError(
                f"sampling.max_response_tokens {self.sampling.max_response_tokens} leaves no room "
                f"for a prompt in sampling.context_length {self.sampling.context_length}"
            )
        if self.sampling.max_response_tokens >= self.max_sample_tokens:
            raise ValueError(
                f"actor.max_tokens_per_gpu {self.actor.max_tokens_per_gpu} leaves no room for a "
                f"prompt beside sampling.max_response_tokens {self.sampling.max_response_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        try:
            _ = self.layout
        except ValueError as err:
            raise ValueError(f"actor.parallel does not fit cluster: {err}") from err
        if self.cluster.actor_nodes > 1:
            unset = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA"}
            unset -= self.actor.env.variables().keys()
            if unset:
                raise ValueError(
                    f"cluster.actor_nodes {self.cluster.actor_nodes} needs the site's values of "
                    + ", ".join(f"actor.env.{name}" for name in sorted(unset))
                )
        return self

    @model_validator(mode="after")
    def _mode_fits(self) -> Self:
        if (self.mode == "train_only") != (self.recording is not None):
            raise ValueError(
                f"mode {self.mode!r} and recording {self.recording!r}: train_only trains a "
                "recording, and only it reads one"
            )
        if self.mode == "rollout_only" and not self.record:
            raise ValueError("mode 'rollout_only' keeps nothing unless record = true")
        if self.mode == "train_only" and (self.eval is not None or self.record):
            raise ValueError("mode 'train_only' has no samplers: leave out eval and record")
        if self.sampling.interrupted == "discard" and self.update.pause_mode != "abort":
            raise ValueError(
                f"sampling.interrupted 'discard' needs update.pause_mode 'abort': with "
                f"{self.update.pause_mode!r} an update interrupts no completion"
            )
        if self.warm_up and (self.warm_up.steps >= self.steps or self.mode == "rollout_only"):
            raise ValueError(
                f"warm_up.steps {self.warm_up.steps} are the first of steps {self.steps}: there "
                "must be more, and mode 'rollout_only' trains none"
            )
        return self

    @model_validator(mode="after")
    def _determinism_fits(self) -> Self:
        timed = bool(self.sampling.extra_samples or self.sampling.max_wait_s)
        if self.deterministic is None:  # told as what it comes to
            follows = self.algorithm.max_lag == 0 and not timed
            object.__setattr__(self, "deterministic", follows)
        if self.deterministic and timed:
            raise ValueError(
                "deterministic jobs do not depend on time: leave out sampling.extra_samples and "
                "sampling.max_wait_s"
            )
        if self.deterministic and self.algorithm.max_lag:
            raise ValueError(
                f"deterministic needs algorithm.max_lag 0, not {self.algorithm.max_lag}: what a "
                "stale sample was drawn with depends on time. Left out, it follows from max_lag"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        sampling, algorithm = self.sampling, self.algorithm
        if sampling.samples_per_prompt == 1 and (algorithm.uses_groups or sampling.dynamic):
            raise ValueError(
                "sampling.samples_per_prompt 1 gives groups without a difference: it needs "
                "algorithm.baseline 'batch_mean' or 'none' and sampling.dynamic = false"
            )
        return self

    @model_validator(mode="after")
    def _sampler_records(self) -> Self:
        ranks = self.rollout.sglang.tensor_parallel
        if self.actor.replay.indexer and self.rollout.engine == "sglang" and ranks > 1:
            raise ValueError(
                f"actor.replay.indexer needs rollout.sglang.tensor_parallel 1, not {ranks}: SGLang "
                "tells the entries of one rank's attention"
            )
        return self

    @property
    def layout(self) -> Layout:
        """The actor's ranks."""
        sizes = self.actor.parallel.model_dump()
        return Layout(world=self.cluster.num_ranks, **sizes)

    @property
    def asks_in_waves(self) -> bool:
        """Whether prompts are drawn only once all that were drawn before have arrived.

        A deterministic job needs it where spare groups are in flight, or a step ends by its share
        of usable groups. Any other draws the same at whatever order of arrival: the fewest prompts,
        from where the last step ended, that have a step's worth of usable groups among them.
        """
        by_order = self.sampling.oversampling > 1 or self.sampling.min_usable_share > 0
        return bool(self.deterministic) and by_order

    @property
    def max_sample_tokens(self) -> int:
        """Prompt and response of the longest sample that can be drawn and trained."""
        budget = self.actor.max_tokens_per_gpu * self.actor.parallel.context
        return min(self.sampling.context_length, budget)

    @property
    def warnings(self) -> list[str]:
        """What a job may say, and its owner should know."""
        found = []
        if self.eval is None and self.mode == "train":
            found.append("no eval section: the online reward alone is biased by dynamic sampling")
        if cut := truncation_warning(self.sampling.top_p, self.sampling.top_k):
            found.append(cut)
        return found


def load_job_file(path: Path) -> dict[str, object]:
    """The raw document of a TOML job file; validate it with `Job.model_validate`."""
    with path.open("rb") as file:
        return tomllib.load(file)


def expand_path(path: str) -> Path:
    """Expand `$VARIABLES` and `~`; an unset variable is an error that names it."""
    expanded = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111
    if "$" in expanded:
        raise ValueError(f"{path}: a variable in it is not set")
    return Path(expanded)
