"""One job's engine with all that belongs to it, from its start to its end."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.rollout.config import RolloutConfig, SGLangConfig
from services.rollout.engine.engine import Engine, EngineLoad, running_engine
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.sglang.spec import Kernels, ServerSpec
from services.rollout.weights import Updates
from shared.errors import Retryable
from shared.job import Job, expand_path
from shared.messages import JobAnnounced
from shared.models.deepseek_v4.architecture import Architecture
from shared.telemetry import gauge
from shared.tokenizer import CheckpointTokenizer

log = structlog.get_logger()


@dataclass(slots=True)
class Serving:
    """What is served for one job. `closing` is set when another job takes its place."""

    job_id: str
    job: Job
    trainer_url: str
    tokenizer: CheckpointTokenizer
    engine: Engine
    updates: Updates
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def policy_version(self) -> int | None:
        return self.engine.policy_version

    async def sample(self, request: GroupRequest, *, timeout_s: float) -> dict[int, Completion]:
        """The completions of a request by sample: all, or the first `request.enough`.

        What an update cut short is resumed under the new version, or begun again if the job says
        so. Retryable when the engine is about to end.
        """
        done: dict[int, Completion] = {}
        wanted, partial = list(request.samples), dict(request.partial)
        enough = min(request.enough or len(wanted), len(wanted))
        async with asyncio.timeout(timeout_s):
            while len(done) < enough:
                part = GroupRequest(
                    request_id=self.engine.new_request_id(),
                    prompt_token_ids=request.prompt_token_ids,
                    samples=wanted,
                    sampling=request.sampling,
                    seed=request.seed,
                    prompt_index=request.prompt_index,
                    policy_version=request.policy_version,
                    partial=partial,
                    with_routes=request.with_routes,
                    enough=enough - len(done),
                )
                completions = await self.engine.generate(part, timeout_s=timeout_s)
                by_index = dict(zip(wanted, completions, strict=True))
                partial = {i: one for i, one in by_index.items() if one.finish_reason == "abort"}
                done |= {i: one for i, one in by_index.items() if i not in partial}
                wanted = list(partial)
                if self.job.sampling.interrupted == "discard":
                    partial = {}
                if len(done) < enough and (self.closing.is_set() or self.engine.died.is_set()):
                    raise Retryable(f"job {self.job_id} is no longer served here")
        return {index: done[index] for index in sorted(done)[:enough]}


@contextlib.asynccontextmanager
async def serving_job(
    announced: JobAnnounced, config: RolloutConfig, *, on_change: Callable[[], None]
) -> AsyncIterator[Serving]:
    """Start the engine that a job asks for, still without weights; leaving ends it."""
    job = Job.model_validate(announced.job)
    checkpoint = expand_path(job.model.rollout_checkpoint)
    folder = staging_folder(config)
    await asyncio.to_thread(_remove_all_but, folder, announced.job_id)
    arch = await asyncio.to_thread(Architecture.load, checkpoint)
    tokenizer = await asyncio.to_thread(CheckpointTokenizer.load, checkpoint)
    spec = engine_spec(job, arch, config)
    async with running_engine(
        spec,
        ids={"replica": config.name, "job_id": announced.job_id},
    ) as engine:
        engine.on_load = _show_load
        updates = Updates(
            engine,
            job_id=announced.job_id,
            folder=folder / announced.job_id,
            deadline_s=job.update.deadline_s,
            activation_limit_s=activation_limit_s(spec, job.update.deadline_s),
            max_bytes=config.max_update_bytes,
            on_change=on_change,
        )
        serving = Serving(announced.job_id, job, announced.trainer_url, tokenizer, engine, updates)
        try:
            yield serving
        finally:
            serving.closing.set()
            await updates.close()
            with contextlib.suppress(OSError):  # a broken transfer is in it
                folder.rmdir()


def engine_spec(job: Job, arch: Architecture, config: RolloutConfig) -> EngineSpec:
    """The engine's part of a job. Unquantised weights come as FP32 tensors."""
    rollout = job.rollout
    return EngineSpec(
        arch=arch if rollout.weights == "quantised" else arch.with_format("fp32"),
        max_running_requests=rollout.sglang.max_running_requests or rollout.max_running_requests,
        context_length=job.sampling.context_length,
        quantise_activations=rollout.quantise_activations,
        num_threads=rollout.num_threads,
        record_experts=job.actor.replay.routing,
        record_entries=job.actor.replay.indexer,
        server=server_spec(job, config.sglang) if rollout.engine == "sglang" else None,
    )


def activation_limit_s(spec: EngineSpec, deadline_s: float) -> float:
    """After which an engine that has not answered is lost. One that drives a server keeps the
    deadline itself, and then has to bring the old version back."""
    return deadline_s if spec.server is None else spec.server.longest_update_s


def server_spec(job: Job, config: SGLangConfig) -> ServerSpec:
    """The server that the job asks for, as this machine runs it."""
    asked, replay = job.rollout.sglang, job.actor.replay
    if (replay.routing or replay.indexer) and config.platform == "cpu":
        raise ValueError(
            "actor.replay: an SGLang server on the CPU tells neither routed experts nor entries"
        )
    return ServerSpec(
        checkpoint=str(expand_path(job.model.rollout_checkpoint).absolute()),
        platform=config.platform,
        kernels=Kernels(**asked.kernels.model_dump()),
        transport=config.transport,
        tensor_parallel=asked.tensor_parallel,
        max_total_tokens=asked.max_total_tokens,
        url=config.url,
        token=None if config.token is None else config.token.get_secret_value(),
        python=config.python,
        log_file=config.log_file,
        extra_arguments=config.extra_arguments,
        stream_interval=config.stream_interval,
        start_deadline_s=config.start_deadline_s,
        update_deadline_s=job.update.deadline_s,
    )


def staging_folder(config: RolloutConfig) -> Path:
    """Of this process alone: nobody else has its port."""
    return config.staging_dir / f"{config.name.replace('/', '_')}-{config.port}"


def _remove_all_but(folder: Path, job_id: str) -> None:
    """What was staged for earlier jobs; of this one a broken transfer goes on."""
    for other in folder.glob("*"):
        if other.name != job_id:
            shutil.rmtree(other, ignore_errors=True)


def _show_load(load: EngineLoad) -> None:
    gauge("rollout_running_completions", "Completions that are decoded.").set(load.running)
    gauge("rollout_waiting_completions", "Completions without a slot.").set(load.waiting)
