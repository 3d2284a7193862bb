"""What crosses the channel between a rollout service and its engine child; no torch here.

Payloads are msgpack maps; arrays travel as raw little-endian bytes.
"""

from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from services.rollout.engine.sglang.spec import ServerSpec
from shared.messages import FinishReason, SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.routes import TokenRoutes


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, complete or as far as they came: what a paused one resumes from."""

    token_ids: np.ndarray  # int32 [R]
    logprobs: np.ndarray  # float32 [R]
    version_spans: list[tuple[int, int]]  # (policy version, tokens), consecutive
    finish_reason: FinishReason
    routes: TokenRoutes | None = None  # of all inputs, prompt included, where they are recorded

    def to_payload(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids.astype("<i4").tobytes(),
            "logprobs": self.logprobs.astype("<f4").tobytes(),
            "version_spans": [list(span) for span in self.version_spans],
            "finish_reason": self.finish_reason,
            "routes": None if self.routes is None else _routes_payload(self.routes),
        }

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Self:
        return cls(
            np.frombuffer(payload["token_ids"], "<i4"),
            np.frombuffer(payload["logprobs"], "<f4"),
            [(version, num) for version, num in payload["version_spans"]],
            cast(FinishReason, payload["finish_reason"]),
            None if payload["routes"] is None else _routes(payload["routes"]),
        )


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Completions of one prompt, named by index. `partial[i]`, where given, is continued."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [P]
    samples: list[int]
    sampling: SamplingParams
    seed: int
    prompt_index: int = 0
    policy_version: int | None = None  # refuse to start under any other
    partial: dict[int, Completion] = field(default_factory=dict)
    with_routes: bool = False  # completions bring the choices that the engine records
    enough: int | None = None  # the request ends once so many samples are complete

    def to_payload(self) -> dict[str, Any]:
        partial = {str(i): one.to_payload() for i, one in self.partial.items()}
        return {
            "request_id": self.request_id,
            "prompt_token_ids": self.prompt_token_ids.astype("<i4").tobytes(),
            "samples": self.samples,
            "sampling": self.sampling.model_dump(),
            "seed": self.seed,
            "prompt_index": self.prompt_index,
            "policy_version": self.policy_version,
            "partial": partial,
            "with_routes": self.with_routes,
            "enough": self.enough,
        }

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Self:
        return cls(
            request_id=payload["request_id"],
            prompt_token_ids=np.frombuffer(payload["prompt_token_ids"], "<i4"),
            samples=payload["samples"],
            sampling=SamplingParams.model_validate(payload["sampling"]),
            seed=payload["seed"],
            prompt_index=payload["prompt_index"],
            policy_version=payload["policy_version"],
            partial={int(i): Completion.from_payload(p) for i, p in payload["partial"].items()},
            with_routes=payload["with_routes"],
            enough=payload["enough"],
        )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is started with; another spec needs another engine."""

    arch: Architecture  # in the format of the published weights
    max_running_requests: int
    context_length: int
    quantise_activations: bool
    num_threads: int
    record_experts: bool = False
    record_entries: bool = False
    server: ServerSpec | None = None  # an SGLang server; None is the embedded engine

    @property
    def records(self) -> bool:
        return self.record_experts or self.record_entries

    def to_payload(self) -> dict[str, Any]:
        return {
            "config": self.arch.to_config(),
            "max_running_requests": self.max_running_requests,
            "context_length": self.context_length,
            "quantise_activations": self.quantise_activations,
            "num_threads": self.num_threads,
            "record_experts": self.record_experts,
            "record_entries": self.record_entries,
            "server": None if self.server is None else self.server.to_payload(),
        }

    @classmethod
    def from_payload(cls, payload: dict[str, Any]) -> Self:
        fields = {key: value for key, value in payload.items() if key not in ("config", "server")}
        server = payload["server"]
        return cls(
            arch=Architecture.from_config(payload["config"]),
            server=None if server is None else ServerSpec.from_payload(server),
            **fields,
        )


def _routes_payload(routes: TokenRoutes) -> dict[str, Any]:
    return {
        "experts": _array_payload(routes.expert_ids),
        "entries": _array_payload(routes.entry_bits),
    }


def _routes(payload: dict[str, Any]) -> TokenRoutes:
    return TokenRoutes(_array(payload["experts"]), _array(payload["entries"]))


def _array_payload(array: np.ndarray | None) -> list[Any] | None:
    return None if array is None else [array.dtype.str, list(array.shape), array.tobytes()]


def _array(payload: list[Any] | None) -> np.ndarray | None:
    if payload is None:
        return None
    dtype, shape, body = payload
    return np.frombuffer(body, dtype).reshape(shape)
