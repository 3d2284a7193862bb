"""Sections of a job about the actor: trained how, spread, kept in memory, launched and watched.

Environment variables have fields of their own: a job can set no other variable of a rank.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.section import Section, SiteValue

Kernel = Literal["torch", "triton"]


class ParallelSection(Section):
    """Sizes of the groups of ranks; their data-parallel size follows from `cluster`."""

    tensor: int = Field(1, ge=1, le=64)
    """Ranks that share each dense layer."""
    pipeline: int = Field(1, ge=1, le=64)
    """Stages that the layers are split into."""
    context: int = Field(1, ge=1, le=64)
    """Ranks that share each sequence."""
    expert: int = Field(1, ge=1, le=1024)
    """Ranks of a pipeline stage over which the routed experts are spread."""
    expert_tensor: int = Field(1, ge=1, le=64)
    """Ranks over which each single expert is spread."""
    first_stage_layers: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage."""
    last_stage_layers: int | None = Field(None, ge=1)
    """Layers of the last one; those between share what is left equally."""


class RecomputeSection(Section):
    """Activations that are computed again in the backward pass instead of being kept."""

    mode: Literal["none", "selective", "full"] = "none"
    """`selective`: attention and experts are recomputed; `full`: each block keeps its input only.
    Both of the first `num_blocks` blocks of each pipeline stage."""
    num_blocks: int | None = Field(None, ge=1)
    """None: all blocks."""

    @model_validator(mode="after")
    def _has_blocks_to_count(self) -> Self:
        if self.mode == "none" and self.num_blocks is not None:
            raise ValueError(f"num_blocks {self.num_blocks} needs mode selective or full")
        return self


class OffloadSection(Section):
    """FP32 masters and moments in host memory; the CPU takes their part of the step."""

    fraction: float = Field(0.0, ge=0, le=1)
    """Share of the optimiser state; 0 keeps all on the device."""
    overlap: bool = True
    """Copy gradients and weights while the CPU works."""


class KernelsSection(Section):
    """Which implementation computes each part; recorded with the run, unknown mixes are refused."""

    mhc_pre: Kernel = "torch"
    """Mixing of the residual streams before a sub-layer."""
    mhc_post: Kernel = "torch"
    """Mixing of the residual streams after it."""
    attention: Kernel = "torch"
    """Attention over the chosen and the nearest entries."""
    indexer: Kernel = "torch"
    """Scores by which sparse attention chooses its entries."""
    experts: Kernel = "torch"
    """The routed experts' products."""
    router: Kernel = "torch"
    """The choice of experts."""
    linear: Literal["torch", "transformer_engine"] = "torch"
    """The products of `actor.precision`: in FP8, `torch` emulates them on any device and
    `transformer_engine` has them computed by the GPU. It needs that package."""

    @model_validator(mode="after")
    def _are_a_known_mix(self) -> Self:
        pairs = [("mhc_pre", "mhc_post"), ("attention", "indexer")]
        for first, second in pairs:  # each hands the other tensors in its own order of memory
            if getattr(self, first) != getattr(self, second):
                raise ValueError(
                    f"{first} {getattr(self, first)} with {second} {getattr(self, second)} is no "
                    "known mix: the two are one implementation"
                )
        return self


class EnvironmentSection(Section):
    """Transport and determinism of the ranks: each field is the environment variable it sets.

    `$SITE_NAME` is read from the environment of the node on which the rank starts.
    """

    NCCL_SOCKET_IFNAME: SiteValue | None = None
    """Network interface of NCCL's or RCCL's bootstrap and socket transport."""
    GLOO_SOCKET_IFNAME: SiteValue | None = None
    """Interface of Gloo."""
    TP_SOCKET_IFNAME: SiteValue | None = None
    """Interface of TensorPipe."""
    NCCL_IB_HCA: SiteValue | None = None
    """InfiniBand or RoCE adapters, as NCCL spells them."""
    NCCL_IB_GID_INDEX: int | None = Field(None, ge=0, le=255)
    """Entry of the adapter's table of addresses (RoCE)."""
    NCCL_IB_TIMEOUT: int | None = Field(None, ge=1, le=22)
    """InfiniBand's own timeout, as an exponent: 4.096 us x 2^value."""
    NCCL_IB_DISABLE: Literal[0, 1] | None = None
    """1: sockets even where there is InfiniBand."""
    NCCL_P2P_NET_CHUNKSIZE: int | None = Field(None, ge=4096)
    """Bytes that one message between two ranks is cut into."""
    NCCL_NVLS_ENABLE: Literal[0, 1, 2] | None = None
    """0: no NVLink multicast; 1: required; 2: where there is any."""
    NCCL_ALGO: SiteValue | None = None
    """A fixed algorithm, with NCCL_PROTO, makes NCCL's sums repeatable."""
    NCCL_PROTO: SiteValue | None = None
    """A fixed protocol."""
    NCCL_DEBUG: Literal["VERSION", "WARN", "INFO"] | None = None
    """What NCCL writes to the ranks' log."""
    GPU_MAX_HW_QUEUES: int | None = Field(None, ge=1, le=64)
    """Hardware queues per device under ROCm."""
    CUDA_DEVICE_MAX_CONNECTIONS: int | None = Field(None, ge=1, le=32)
    """Hardware queues between host and GPU; 1 keeps launches in order."""
    CUBLAS_WORKSPACE_CONFIG: Literal[":4096:8", ":16:8"] | None = None
    """Makes cuBLAS repeatable."""

    def variables(self) -> dict[str, str]:
        """Those that are set, as text; `$SITE_…` not yet read."""
        return {name: str(value) for name, value in self if value is not None}


class WatchdogSection(Section):
    """When ranks count as stalled, and what they then leave behind."""

    stall_s: float = Field(600.0, gt=0)
    """Longest time without progress of any rank before a stall is diagnosed; only while an
    operation runs."""
    collective_timeout_s: float = Field(900.0, gt=0)
    """Longest wait of one collective in a rank itself."""
    dump_on_timeout: bool = True
    """Write the flight recorder when a collective times out."""
    trace_buffer_size: int = Field(20_000, ge=0)
    """Collectives that the flight recorder remembers, under its older name."""
    flight_recorder_buffer_size: int = Field(20_000, ge=0)
    """Collectives that it remembers."""
    desync_debug: bool = True
    """Have ranks say which collective each was in."""
    async_error_handling: Literal[0, 1, 2, 3] = 1
    """1: a failed collective ends its process."""
    trace_file: str = Field("watchdog/nccl_trace_rank_", pattern=r"^[A-Za-z0-9_/-]+$")
    """In the run folder; NCCL appends the rank."""

    def variables(self, run_dir: str) -> dict[str, str]:
        """The environment of the ranks of the run in `run_dir`."""
        return {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(self.dump_on_timeout)),
            "TORCH_NCCL_TRACE_BUFFER_SIZE": str(self.trace_buffer_size),
            "TORCH_FR_BUFFER_SIZE": str(self.flight_recorder_buffer_size),
            "TORCH_NCCL_DESYNC_DEBUG": str(int(self.desync_debug)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": str(self.async_error_handling),
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{run_dir}/{self.trace_file}",
        }


class OptimizerSection(Section):
    """AdamW, its warm-up and its clipping."""

    learning_rate: float = Field(1e-6, gt=0)
    """Constant after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, as AdamW has it."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradients' mean."""
    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of their squares' mean."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the squares' mean."""
    clip_grad: float = Field(1.0, gt=0)
    """Largest norm of all gradients together."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    offload: OffloadSection = OffloadSection()
    """What of its state is kept in host memory."""


class ReplaySection(Section):
    """Choices of the sampler that the actor repeats instead of making its own."""

    routing: bool = False
    """Send every token to the experts that the sampler chose; their weights are the actor's own."""
    indexer: bool = False
    """Attend to the compressed entries that the sampler's indexer selected."""

    @property
    def on(self) -> bool:
        return self.routing or self.indexer


class ActorSection(Section):
    """The trained policy: precision, layout and optimiser of its ranks."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations; masters and moments are FP32."""
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
    precision: Literal["dtype", "fp8"] = "dtype"
    """What the matrix products of linear layers and experts take, forward and backward. `fp8`: both
    operands rounded to E4M3, activations and gradients in groups of 128, weights in blocks of
    128x128; sums, masters and everything else as before. How: `kernels.linear`."""
    mtp_loss_weight: float = Field(0.0, ge=0, le=1)
    """Above 0 the MTP blocks are trained, on the response tokens; the policy's gradient is the same
    either way. Needs context parallelism of 1."""
    replay: ReplaySection = ReplaySection()
    """Which of the sampler's discrete choices are recorded there and made again here."""
    num_threads: int = Field(1, gt=0)
    """CPU threads of each rank."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW."""
    parallel: ParallelSection = ParallelSection()
    """How the model is spread over ranks."""
    recompute: RecomputeSection = RecomputeSection()
    """Which activations are computed again instead of kept."""
    kernels: KernelsSection = KernelsSection()
    """Which implementation computes each part."""
    env: EnvironmentSection = EnvironmentSection()
    """Environment variables of the ranks."""
    watchdog: WatchdogSection = WatchdogSection()
    """When ranks count as stalled."""
    deterministic: bool = False
    """Refuse operations on a GPU whose sums depend on the order of threads."""

    @model_validator(mode="after")
    def _products_are_a_known_mix(self) -> Self:
        linear, experts = self.kernels.linear, self.kernels.experts
        if linear == "transformer_engine" and (self.precision, self.dtype) != ("fp8", "bfloat16"):
            raise ValueError(
                f"kernels.linear 'transformer_engine' computes FP8 products of a BF16 actor: "
                f"precision {self.precision!r} with dtype {self.dtype!r} is no known mix"
            )
        if self.precision == "fp8" and experts != "torch":
            raise ValueError(
                f"precision 'fp8' with kernels.experts {experts!r} is no known mix: the experts' "
                f"products are those of kernels.linear"
            )
        return self
