"""The job document: one strict schema for REST (JSON) and files (TOML); unknown keys are errors.

Every field does something; nothing is read past this schema. Token budgets are tokens, not bytes.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.job_actor import (
    EnvironmentSection,
    KernelsSection,
    OffloadSection,
    ParallelSection,
    RecomputeSection,
    WatchdogSection,
)
from shared.job_algorithm import AlgorithmSection
from shared.job_cluster import ClusterSection, SGLangSection, TrackingSection
from shared.job_reward import GraderName, OverlongSection, RewardPart
from shared.job_sampling import SamplingSection
from shared.job_warm_up import WarmUpSection
from shared.parallel import Layout
from shared.section import Section

PromptFormat = Literal["raw", "thinking", "non_thinking"]
DataFormat = Literal["auto", "prompt", "dapo", "gsm8k", "math500", "aime", "deepmath"]


class ModelSection(Section):
    rollout_checkpoint: str
    """Directory in the release layout; gives the samplers their architecture and tokenizer."""
    actor_checkpoint: str | None = None
    """Where the actor's first weights come from; default: the rollout checkpoint, dequantised."""


class DataSection(Section):
    path: str | None = None
    """Local JSONL or parquet file; `$DATA_ROOT` and other variables are expanded."""
    dataset: str | None = None
    """Hugging Face data set id, where there is a network."""
    split: str = "train"
    """Split of `dataset`; a local file has none."""
    format: DataFormat = "auto"
    """How a row is read; `auto` decides by the first row's keys."""
    prompt_template: str = "{problem}"
    """What the policy is asked; `{problem}` is the row's text."""
    prompt_format: PromptFormat = "raw"
    """`thinking` and `non_thinking` are DeepSeek-V4's chat format; `raw` is the template alone."""
    system: str = ""
    """The chat formats' system prompt."""
    shuffle: bool = True
    """Draw rows in an order given by the job's seed, anew each epoch."""
    max_rows: int | None = Field(None, gt=0)
    """Use only the first rows of the file."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give either path or dataset")
        if "{problem}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} lacks {{problem}}")
        if self.system and self.prompt_format == "raw":
            raise ValueError("a system prompt needs a chat format, prompt_format is raw")
        return self


class OptimizerSection(Section):
    learning_rate: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    offload: OffloadSection = OffloadSection()


class ReplaySection(Section):
    routing: bool = False
    """Send every token to the experts that the sampler chose; their weights are the actor's own."""
    indexer: bool = False
    """Attend to the compressed entries that the sampler's indexer selected."""

    @property
    def on(self) -> bool:
        return self.routing or self.indexer


class ActorSection(Section):
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_tokens_per_gpu: int = Field(8192, gt=0)
    """Token budget of one micro-batch on each rank, padding included. With what the context ranks
    share, also the longest sample: prompts that could grow beyond it are skipped and counted."""
    freeze_router: bool = True
    """Keep the gates' weights and biases as they are."""
    clamp_shared_expert: bool = True
    """The same flag is read by the sampler."""
    quantisation: Literal["none", "weights", "full"] = "none"
    """What the actor rounds as its sampler does, to train and score the policy that is sampled.
    `weights`: passes run on the published values, gradients go straight through to the masters.
    `full`: also the activations that the sampler rounds (`rollout.quantise_activations`)."""
    mtp_loss_weight: float = Field(0.0, ge=0, le=1)
    """Above 0 the MTP blocks are trained, on the response tokens; the policy's gradient is the same
    either way. Needs context parallelism of 1."""
    replay: ReplaySection = ReplaySection()
    """Which of the sampler's discrete choices are recorded there and made again here."""
    num_threads: int = Field(1, gt=0)
    """CPU threads of each rank."""
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    recompute: RecomputeSection = RecomputeSection()
    kernels: KernelsSection = KernelsSection()
    env: EnvironmentSection = EnvironmentSection()
    watchdog: WatchdogSection = WatchdogSection()
    deterministic: bool = False
    """Refuse operations on a GPU whose sums depend on the order of threads."""


class RolloutSection(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    max_running_requests: int = Field(128, gt=0)
    """Completions decoded at the same time by one server."""
    quantise_activations: bool = True
    """Fake-quantise inputs of FP8 linears, the KV cache and the indexer as the release does."""
    weights: Literal["quantised", "float32"] = "quantised"
    """float32 serves unquantised weights, to measure what quantisation costs."""
    num_threads: int = Field(1, gt=0)
    sglang: SGLangSection = SGLangSection()


class UpdateSection(Section):
    max_shard_bytes: int = Field(64 * 2**20, gt=0)
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    deadline_s: float = Field(120.0, gt=0)
    """A server that has not committed by then is quarantined until it has caught up."""
    probe_sequences: int = Field(4, ge=0)
    """Fixed prompts scored after each restore and compared with the trainer; 0 skips the probe."""
    probe_max_mean_abs_delta: float = Field(0.5, gt=0)
    keep_versions: int = Field(50, ge=1)
    """Versions that can be served again (`weights rollback`), stored as changes where possible."""
    keep_bytes: int = Field(64 * 2**30, ge=0)
    """The oldest go when all take more; what is current, held or being read stays anyway."""
    delta: bool = True
    """Also publish what changed since the version before; servers that hold it pull only that."""
    transport: Literal["http", "nccl", "gloo"] = "http"
    """`nccl`: shards are broadcast from the ranks' GPUs to the servers' (`gloo`: the same between
    CPUs). What does not arrive that way is pulled over HTTP."""
    max_sends: int = Field(2, gt=0)
    """How often the trainer sends a shard of one version; further servers pull from servers."""


class RewardSection(Section):
    grader: GraderName = "math"
    """`math` (MATH, DeepMath), `aime`, `gsm8k`, `dapo`, `code`, `format`, `arithmetic`; one that
    the reward service knows as `plugin.<name>` or `remote.<name>`."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Further graders whose scores are added by weight."""
    overlong: OverlongSection | None = None
    """The penalty for long responses (DAPO)."""
    retries: int = Field(0, ge=0, le=5)
    """How often a check that timed out or failed is repeated before it counts as unscored."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """Wall-clock limit of one check, enforced from outside."""
    unscored: Literal["drop_group", "zero"] = "drop_group"
    """What a group with an unparseable, timed-out or failed check becomes. Unparseable text is an
    answer that earns nothing under `zero`; time-outs and errors drop the group either way."""


class SuiteSection(Section):
    """What is asked in an evaluation, how, and who grades it."""

    suite: str
    """Name shown in reports."""
    data: DataSection
    samples_per_problem: int = Field(8, gt=0)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_response_tokens: int = Field(gt=0)
    budgets: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    """Smaller response budgets to report, too; the same samples cut there tell what they were."""
    grader: GraderName = "aime"
    max_problems: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _budgets_are_smaller(self) -> Self:
        if (most := max(self.budgets, default=0)) > self.max_response_tokens:
            raise ValueError(
                f"budgets: {most} exceeds max_response_tokens {self.max_response_tokens}"
            )
        return self


class EvalSection(SuiteSection):
    every_steps: int = Field(10, gt=0)
    deadline_s: float = Field(600.0, gt=0)
    """Of one evaluation, all suites; a server is not kept from training for longer."""
    server: Literal["lease", "dedicated"] = "lease"
    """`lease`: a server is taken from training for each evaluation and keeps the version until it
    is done. `dedicated`: one server does nothing but evaluations; needs two servers."""
    also: list[SuiteSection] = Field(default_factory=list)
    """Further suites, asked of the same version in the same lease."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.suite, *(one.suite for one in self.also)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"also: two suites are named {twice!r}")
        return self

    @property
    def suites(self) -> list[SuiteSection]:
        """All suites; the first is the one that curves and comparisons of a run show."""
        return [self, *self.also]


class CheckpointSection(Section):
    every_steps: int = Field(10, gt=0)
    keep_last: int = Field(2, gt=0)
    keep_every: int | None = Field(None, gt=0)
    """Checkpoints of steps that are multiples of this are kept for good."""
    background: bool = True
    """Copy the state to host memory and train on while it is written."""


class BoundsSection(Section):
    """A job beyond its bounds is paused instead of trained on a broken policy."""

    max_mean_abs_delta_logprob: float = Field(1.0, gt=0)
    step_deadline_s: float = Field(1800.0, gt=0)
    """Longest wait for one step's groups; the error says which stage they are in."""


class AttributionSection(Section):
    """Where the difference between sampler and trainer comes from, asked of some samples."""

    every_steps: int = Field(10, ge=0)
    """0 never asks."""
    samples: int = Field(16, gt=0)
    """Of the step's batch, those that are scored on every rung."""


class PreflightSection(Section):
    """What a job proves before its first step; beyond these bounds it does not start."""

    enabled: bool = True
    deadline_s: float = Field(300.0, gt=0)
    """Longest wait for a server to serve the first version, and for the comparison with it."""
    max_mean_abs_delta_logprob: float = Field(0.05, gt=0)
    """Between an embedded sampler and the ranks rounding alike: there a difference is a mistake. As
    the ranks train, and for other engines, `bounds.max_mean_abs_delta_logprob` holds."""
    walk: bool = True
    """Refuse also when a layer walk names a sub-module that departs."""
    max_memory_share: float = Field(0.95, gt=0)
    """Of the available memory that ranks and sampler may be planned to need."""


class Job(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    seed: int = Field(0, ge=0, lt=2**63)
    steps: int = Field(gt=0)
    mode: Literal["train", "rollout_only", "train_only"] = "train"
    """rollout_only samples, grades and records with the first weights; a step is then so many
    groups. train_only trains the steps of a recording, without samplers."""
    deterministic: bool = False
    """Take groups in draw order, whatever order they arrive in: the same job twice gives the same
    groups. Needs `algorithm.max_lag = 0`."""
    record: bool = False
    """Keep every group that arrives, for `replay` and `explain`."""
    warm_up: WarmUpSection | None = None
    """Supervised first steps."""
    recording: str | None = None
    """Run folder with a recording; train_only needs it."""
    model: ModelSection
    data: DataSection
    sampling: SamplingSection
    algorithm: AlgorithmSection = AlgorithmSection()
    actor: ActorSection = ActorSection()
    rollout: RolloutSection = RolloutSection()
    update: UpdateSection = UpdateSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    bounds: BoundsSection = BoundsSection()
    preflight: PreflightSection = PreflightSection()
    attribution: AttributionSection = AttributionSection()
    cluster: ClusterSection = ClusterSection()
    tracking: TrackingSection = TrackingSection()

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
        timed = self.sampling.extra_samples or self.sampling.max_wait_s
        if self.warm_up and (self.warm_up.steps >= self.steps or self.mode == "rollout_only"):
            raise ValueError(
                f"warm_up.steps {self.warm_up.steps} are the first of steps {self.steps}: there "
                "must be more, and mode 'rollout_only' trains none"
            )
        if self.deterministic and timed:
            raise ValueError(
                "deterministic jobs do not depend on time: leave out sampling.extra_samples and "
                "sampling.max_wait_s"
            )
        if self.deterministic and self.algorithm.max_lag:
            raise ValueError(
                f"deterministic needs algorithm.max_lag 0, not {self.algorithm.max_lag}: what a "
                "stale sample was drawn with depends on time"
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
        if self.actor.replay.indexer and self.rollout.engine != "embedded":
            raise ValueError(
                f"actor.replay.indexer needs rollout.engine 'embedded': {self.rollout.engine!r} "
                f"does not tell which entries it chose"
            )
        return self

    @property
    def layout(self) -> Layout:
        """The actor's ranks."""
        sizes = self.actor.parallel.model_dump()
        return Layout(world=self.cluster.num_ranks, **sizes)

    @property
    def max_sample_tokens(self) -> int:
        """Prompt and response of the longest sample that can be drawn and trained."""
        budget = self.actor.max_tokens_per_gpu * self.actor.parallel.context
        return min(self.sampling.context_length, budget)

    @property
    def warnings(self) -> list[str]:
        if self.eval is None and self.mode == "train":
            return ["no eval section: the online reward alone is biased by dynamic sampling"]
        return []


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
