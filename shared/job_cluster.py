"""Sections of a job about its machines, its real inference server and who is told of it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.section import Section, SiteValue


class RendezvousSection(Section):
    """Where the ranks of several nodes meet, through torchrun."""

    host: SiteValue | None = None
    """Address of the conductor's node as the other nodes see it; one node needs none."""
    port: int = Field(29400, ge=1024, le=65535)
    """Of torchrun's rendezvous, on `host`."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for all nodes."""


class ClusterSection(Section):
    """One node, with one rank, unless it says otherwise."""

    nodes: int = Field(1, ge=1, le=1024)
    """Machines in all: `actor_nodes` and `rollout_nodes`."""
    actor_nodes: int = Field(1, ge=1, le=1024)
    """Machines that ranks run on."""
    rollout_nodes: int = Field(0, ge=0, le=1024)
    """0: samplers run on the actor's nodes, too."""
    gpus_per_node: int = Field(1, ge=1, le=64)
    """Ranks on each actor node; each takes one GPU where there are any."""
    rendezvous: RendezvousSection = RendezvousSection()
    """Where ranks of several nodes meet."""

    @property
    def num_ranks(self) -> int:
        return self.actor_nodes * self.gpus_per_node

    @model_validator(mode="after")
    def _nodes_add_up(self) -> Self:
        if self.actor_nodes + self.rollout_nodes != self.nodes:
            raise ValueError(
                f"actor_nodes {self.actor_nodes} + rollout_nodes {self.rollout_nodes} are not "
                f"nodes {self.nodes}"
            )
        if self.actor_nodes > 1 and self.rendezvous.host is None:
            raise ValueError(f"actor_nodes {self.actor_nodes} need rendezvous.host")
        return self


class SGLangKernelsSection(Section):
    """How an SGLang server on a GPU computes each part; `auto` is its platform's preset."""

    mhc_prenorm: Literal["auto", "deep_gemm", "plain"] = "auto"
    """`deep_gemm` only for servers that keep no copies of the mixing matrices (0.5.17): later ones
    refuse updates with it."""
    mhc_pre: Literal["auto", "tilelang", "torch"] = "auto"
    """Mixing of the residual streams before a sub-layer."""
    mhc_post: Literal["auto", "tilelang", "torch"] = "auto"
    """Mixing of the residual streams after it."""
    attention: Literal["auto", "flashmla", "aiter_sparse", "tilelang", "triton", "torch"] = "auto"
    """Sparse MLA decoding; `flashmla` on CUDA, the others on ROCm."""
    indexer: Literal["auto", "deep_gemm", "tilelang", "aiter"] = "auto"
    """Scores by which sparse attention chooses its entries."""
    compressor: Literal["auto", "paged", "online"] = "auto"
    """How the compressed entries of the KV cache are made."""
    hash_topk: Literal["auto", "fused", "plain"] = "auto"
    """Choice of experts in the layers that route by a hash of the token."""


class SGLangSection(Section):
    """Arguments of the SGLang server that a rollout service starts."""

    max_running_requests: int | None = Field(None, gt=0)
    """None: `rollout.max_running_requests`."""
    max_total_tokens: int | None = Field(None, gt=0)
    """Tokens of the KV cache; None: what fits."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs of one server."""
    kernels: SGLangKernelsSection = SGLangKernelsSection()
    """How the server computes each part."""


class WandbSection(Section):
    """Where Weights & Biases keeps the run."""

    project: str = "tandem"
    """Where the run is listed."""
    entity: str | None = None
    """Account or team; None: the default one of the key."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes to the run folder, for `wandb sync`; `online` sends, and needs
    `WANDB_API_KEY` in the trainer's environment."""


class TrackingSection(Section):
    """Who else is told the run's numbers; the run folder has them in any case."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` of the run folder."""
    wandb: WandbSection | None = None
    """Keep a run of Weights & Biases."""

    @property
    def is_on(self) -> bool:
        return self.tensorboard or self.wandb is not None
