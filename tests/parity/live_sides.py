"""Actor and engine as their services hold them, in one process, asked through packed bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.weights import build_version
from services.trainer.engine.actor import Actor
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.trace import Traced, TraceRequest
from tests.parity.engines import LENGTH, stored


def job_of(release: Path, **actor: object) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": str(release)},
            "data": {"path": "unused.jsonl"},
            "sampling": {"context_length": LENGTH + 20, "max_response_tokens": 24},
            "actor": {"dtype": "float32", **actor},
        }
    )


@dataclass(frozen=True, slots=True)
class TrainerSide:
    actor: Actor
    policy_version: int = 0

    async def __call__(self, request: TraceRequest) -> Traced:
        states = self.actor.trace(TraceRequest.unpack(request.pack()))
        return Traced.unpack(Traced(policy_version=self.policy_version, states=states).pack())


@dataclass(frozen=True, slots=True)
class SamplerSide:
    engine: EmbeddedEngine

    @classmethod
    def of(cls, arch: Architecture, weights: Mapping[str, Tensor]) -> "SamplerSide":
        """Serves version 0 of `weights`, quantised to the architecture's format."""
        engine = EmbeddedEngine(EngineSpec(arch, 4, LENGTH + 20, True, 1))
        engine.scheduler.switch(build_version(0, arch, stored(arch, weights)), "in_place")
        return cls(engine)

    async def __call__(self, request: TraceRequest) -> Traced:
        return Traced.unpack(self.engine.trace(TraceRequest.unpack(request.pack())).pack())
