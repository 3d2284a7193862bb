"""Which SGLang server an engine drives, and how its weights travel; no torch here."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

_BETWEEN_S = 300.0  # servers that end, labels, sessions that are closed, a server that goes on
# Tokens that a server's context is longer than the job's: SGLang takes no input within 6 tokens of
# the end of its own, and samples one token less than fit.
CONTEXT_SPARE = 7
# A name to ask `get_weights_by_name` for: under it our class of model tells how far its copies of
# the attention sinks are from the sinks.
SINKS_DEPARTURE = "tandem.attn_sinks.departure"
Platform = Literal["cpu", "cuda", "rocm"]
TransportName = Literal["disk", "tensor", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """How each part of the model is computed on a GPU; `kernels.py` says what there is."""

    mhc_prenorm: str = "auto"
    mhc_pre: str = "auto"
    mhc_post: str = "auto"
    attention: str = "auto"
    indexer: str = "auto"
    compressor: str = "auto"
    hash_topk: str = "auto"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server that this engine starts as its child, or, with a `url`, one that runs already."""

    checkpoint: str  # release layout: what a fresh server loads
    platform: Platform = "cpu"
    kernels: Kernels = Kernels()
    transport: TransportName = "disk"
    tensor_parallel: int = 1
    max_total_tokens: int | None = None
    url: str | None = None
    token: str | None = None
    python: str | None = None  # interpreter that has SGLang; None: this one
    log_file: str | None = None
    extra_arguments: tuple[str, ...] = ()
    stream_interval: int = 0  # tokens between two answers of a sequence; 0: one, at its end
    start_deadline_s: float = 600.0
    update_deadline_s: float = 120.0

    @property
    def longest_update_s(self) -> float:
        """Until an update is answered when all goes wrong that can.

        It waits for a server that is being replaced (start, load, probe); takes until its deadline;
        what the server keeps of the old weights is rebuilt, then lost with a fresh server (start,
        probe); the old version is loaded back, then started (load, start, probe).
        """
        num_starts = 3 if self.url is None else 1
        return num_starts * self.start_deadline_s + 7 * self.update_deadline_s + _BETWEEN_S

    def to_payload(self) -> dict[str, Any]:
        return asdict(self) | {"extra_arguments": list(self.extra_arguments)}

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Self:
        kernels = Kernels(**payload["kernels"])
        arguments = tuple(payload["extra_arguments"])
        return cls(**payload | {"kernels": kernels, "extra_arguments": arguments})


def python_path(*, on_cpu: bool = True) -> str:
    """PYTHONPATH of processes that import SGLang and our models of it: this tree, and before it, on
    a CPU, the stand-ins."""
    here = Path(__file__)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [str(here.parent / "cpu_site")] if on_cpu else []
    ours.append(str(here.parents[4]))
    return os.pathsep.join([*ours, *(path for path in given if path and path not in ours)])
