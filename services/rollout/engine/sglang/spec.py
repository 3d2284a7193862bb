"""Which SGLang server an engine drives, and how its weights travel; no torch here."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

Platform = Literal["cpu", "cuda", "rocm"]
TransportName = Literal["disk", "tensor", "gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server that this engine starts as its child, or, with a `url`, one that runs already."""

    checkpoint: str  # release layout: what a fresh server loads
    platform: Platform = "cpu"
    transport: TransportName = "disk"
    tensor_parallel: int = 1
    max_total_tokens: int | None = None
    url: str | None = None
    token: str | None = None
    python: str | None = None  # interpreter that has SGLang; None: this one
    log_file: str | None = None
    extra_arguments: tuple[str, ...] = ()
    start_deadline_s: float = 600.0
    update_deadline_s: float = 120.0

    def to_payload(self) -> dict[str, Any]:
        return asdict(self) | {"extra_arguments": list(self.extra_arguments)}

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Self:
        return cls(**payload | {"extra_arguments": tuple(payload["extra_arguments"])})
