"""Sections of a job about its samplers and about how new weights reach them."""

from typing import Literal

from pydantic import Field

from shared.job_cluster import SGLangSection
from shared.section import Section


class RolloutSection(Section):
    """Who samples, and how it serves the weights."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: this project's own, a process of the service. `sglang`: an SGLang server that the
    service starts or is given."""
    max_running_requests: int = Field(128, gt=0)
    """Completions decoded at the same time by one server."""
    quantise_activations: bool = True
    """Fake-quantise inputs of FP8 linears, the KV cache and the indexer as the release does."""
    weights: Literal["quantised", "float32"] = "quantised"
    """float32 serves unquantised weights, to measure what quantisation costs."""
    num_threads: int = Field(1, gt=0)
    """CPU threads of the embedded engine."""
    sglang: SGLangSection = SGLangSection()
    """Arguments of an SGLang server."""


class UpdateSection(Section):
    """How a new version reaches the servers."""

    max_shard_bytes: int = Field(64 * 2**20, gt=0)
    """Size of the pieces in which a version is published and checked."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """Of completions under way. in_place: they go on where they are. retract: they queue again and
    go on from there. abort: they are ended and sampled anew."""
    deadline_s: float = Field(120.0, gt=0)
    """For which one server is waited in one update, from the first question to its commit; beyond
    that it is quarantined until it has caught up."""
    probe_sequences: int = Field(4, ge=0)
    """Fixed prompts scored after each restore and compared with the trainer, which rounds for them
    as its servers do; 0 skips the probe."""
    probe_max_mean_abs_delta: float = Field(0.5, gt=0)
    """A server whose probe is further than this from the trainer restores the version before."""
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
