"""What the planner reads of a job, and the machine that it plans for."""

from dataclasses import dataclass, field
from typing import Literal, Self

from shared.job import Job
from shared.models.deepseek_v4.layout import ROW_ALIGNMENT
from shared.parallel import Layout
from shared.planner.activations import MicroBatch, Precision, Recompute

GB = 10**9
# Not counted but assumed: the device's context, libraries' workspaces, buffers of communicators.
RUNTIME_BYTES = 4 * GB
# Share of the device that an allocator cannot use for want of whole pieces.
FRAGMENTATION = 0.04


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of one GPU and of one node's host, in bytes; None is not judged."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    gpus_per_node: int = 8

    @property
    def usable_gpu_bytes(self) -> int | None:
        if self.gpu_bytes is None:
            return None
        return int(self.gpu_bytes * (1 - FRAGMENTATION)) - RUNTIME_BYTES


@dataclass(frozen=True, slots=True)
class Setup:
    """The part of a job that decides memory and traffic. Lengths are those of the longest sample
    that the job allows."""

    layout: Layout = field(default_factory=Layout)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rounds: bool = False
    rounds_activations: bool = False
    freeze_router: bool = True
    mtp_loss_weight: float = 0.0
    fp8: bool = False
    max_tokens: int = 8192
    sample_tokens: int = 8192
    response_tokens: int = 4096
    samples_per_step: int = 256
    updates_per_step: int = 1
    recompute: Recompute = "none"
    recomputed_blocks: int | None = None
    offload: float = 0.0
    keeps_reference: bool = False
    scores_as_served: bool = True
    """Weights are rounded in place for passes as the samplers make them, the first comparison with
    a server and each version's probe: as a job does unless it says otherwise."""
    background_saves: bool = False
    """Checkpoints are copied to host memory first, as a job does unless it says otherwise."""
    row_alignment: int = ROW_ALIGNMENT
    """Rows are padded to multiples of this; `plan_setup` knows what layout and model ask for."""

    @classmethod
    def of(cls, job: Job) -> Self:
        actor, sampling = job.actor, job.sampling
        return cls(
            layout=job.layout,
            dtype=actor.dtype,
            rounds=actor.quantisation != "none",
            rounds_activations=actor.quantisation == "full",
            freeze_router=actor.freeze_router,
            mtp_loss_weight=actor.mtp_loss_weight,
            fp8=actor.precision == "fp8",
            max_tokens=actor.max_tokens_per_gpu,
            sample_tokens=job.max_sample_tokens,
            response_tokens=sampling.max_response_tokens,
            samples_per_step=sampling.groups_per_step * sampling.samples_per_prompt,
            updates_per_step=job.algorithm.updates_per_batch,
            recompute=actor.recompute.mode,
            recomputed_blocks=actor.recompute.num_blocks,
            offload=actor.optimizer.offload.fraction,
            keeps_reference=job.algorithm.kl.coefficient > 0,
            scores_as_served=job.preflight.enabled or job.update.probe_sequences > 0,
            background_saves=job.checkpoint.background,
        )

    @property
    def trains_mtp(self) -> bool:
        return self.mtp_loss_weight > 0

    @property
    def precision(self) -> Precision:
        return Precision(2 if self.dtype == "bfloat16" else 4, self.rounds_activations)

    @property
    def row_tokens(self) -> int:
        """Of the longest sample, padded, on one of its context ranks."""
        aligned = -(-self.sample_tokens // self.row_alignment) * self.row_alignment
        return -(-aligned // self.layout.context)

    @property
    def rows(self) -> int:
        """Longest samples that share a micro-batch."""
        return max(1, self.max_tokens // self.row_tokens)

    @property
    def micro_batch(self) -> MicroBatch:
        """The largest one of a rank."""
        scored = self.rows * min(self.response_tokens, self.sample_tokens)
        return MicroBatch(self.rows, self.row_tokens, -(-scored // self.layout.context))

    @property
    def micro_batches(self) -> int:
        """Of one update on each data-parallel rank, when all samples are the longest."""
        samples = -(-self.samples_per_step // self.updates_per_step)
        return -(-samples // (self.layout.data * self.rows))
