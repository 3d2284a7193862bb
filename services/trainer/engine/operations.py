"""What a rank can be asked to do. Payloads and answers are msgpack values; see each handler."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from services.trainer import checkpoint
from services.trainer.engine.actor import Actor
from services.trainer.engine.own_shards import OwnShards
from services.trainer.engine.published import published_checksum
from services.trainer.engine.rank_spans import spans_of_ranks
from services.trainer.engine.sharing import exchange, own_tensors
from services.trainer.engine.step_metrics import Progress
from services.trainer.export import export_version
from services.trainer.megatron import parallel
from services.trainer.run_environment import write_environment
from shared.environment import chosen_variables, process_facts
from shared.errors import TandemError
from shared.job import Job
from shared.messages import TrainingBatch, TrainingSample
from shared.parity.trace import Traced, TraceRequest
from shared.spans import span
from shared.telemetry import bind_process
from shared.weights.group import send_shards
from shared.weights.manifest import MANIFEST_FILE, Manifest, ShardEntry, shard_file
from shared.weights.protocol import GroupTransfer

log = structlog.get_logger()


class Operations:
    """`init` comes first; the others raise ValueError before it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._actor: Actor | None = None
        self._checkpoints = checkpoint.Writer()
        self._job_id = ""
        self._shards: OwnShards | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "init": self._init,
            "train_step": self._train_step,
            "score": self._score,
            "trace": self._trace,
            "attribute": self._attribute,
            "export": self._export,
            "send": self._send,
            "checksum": self._checksum,
            "save": self._save,
            "load": self._load,
            "spans": self._spans,
        }

    def run(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        if op not in self._handlers:
            raise ValueError(f"unknown operation {op!r}; known: {', '.join(self._handlers)}")
        began_s = time.perf_counter()
        self._checkpoints.finish(wait=op == "load")
        # Telling spans is no work of the job.
        with nullcontext() if op == "spans" else span(op, "operations"):
            result = self._handlers[op](payload)
        log.debug("operation_done", op=op, seconds=round(time.perf_counter() - began_s, 4))
        return result

    @property
    def actor(self) -> Actor:
        if self._actor is None:
            raise ValueError("no job yet: init comes first")
        return self._actor

    def _init(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{job_id, job, run_dir} -> {step, policy_version, num_parameters}: the first weights."""
        job = Job.model_validate(payload["job"])
        torch.set_num_threads(job.actor.num_threads)
        # Tiny softmax weights become denormals, on which a CPU is a hundred times slower.
        torch.set_flush_denormal(True)
        torch.manual_seed(job.seed)
        parallel.initialise(
            seed=job.seed,
            layout=job.layout,
            timeout_s=job.actor.watchdog.collective_timeout_s,
        )
        self._job_id = payload["job_id"]
        bind_process(job_id=self._job_id)
        self._actor = Actor(job, progress=self._progress)
        if run_dir := payload.get("run_dir"):
            write_environment(Path(run_dir), f"rank{torch.distributed.get_rank()}", _facts())
        return {**self._state(), "num_parameters": self._actor.num_parameters}

    def _train_step(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{batch: packed TrainingBatch, is_replay} -> metrics, `seconds` by phase, and `_state`."""
        batch = TrainingBatch.unpack(payload["batch"])
        if batch.step != self.actor.step + 1:
            raise ValueError(f"step {batch.step} cannot follow step {self.actor.step}")
        metrics = self.actor.train_step(batch, is_replay=payload.get("is_replay", False))
        return {**metrics, **self._state()}

    def _score(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{sequences: [[token ids]], temperature, rounding} -> {logprobs: [[of 1..T-1]]}."""
        sequences = [np.array(ids, np.int64) for ids in payload["sequences"]]
        temperature = float(payload.get("temperature", 1.0))
        rounding = payload.get("rounding", "own")
        logprobs = self.actor.score(sequences, temperature=temperature, rounding=rounding)
        return {"logprobs": [row.tolist() for row in logprobs], **self._state()}

    def _trace(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{request: packed TraceRequest, policy_version} -> {traced: packed Traced}."""
        states = self.actor.trace(TraceRequest.unpack(payload["request"]))
        traced = Traced(policy_version=int(payload["policy_version"]), states=states)
        return {"traced": traced.pack(), **self._state()}

    def _attribute(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{samples: [packed TrainingSample], temperature, folders: [[version, path]]} -> {ladder:
        {rung: [of all response tokens]}}."""
        ladder = self.actor.climb(
            [TrainingSample.unpack(body) for body in payload["samples"]],
            temperature=float(payload["temperature"]),
            folders={int(version): Path(path) for version, path in payload["folders"]},
        )
        return {"ladder": {rung: values.tolist() for rung, values in ladder.items()}}

    def _export(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{policy_version, path, base} -> {bytes, delta_bytes, num_shards, num_tensors, seconds,
        owners}.

        `base` is the directory of an earlier version, or null. `owners` are the addresses at which
        several ranks serve their parts, by rank.
        """
        began_s = time.perf_counter()
        actor = self.actor
        self._progress("export", actor.step)
        base = payload.get("base")
        manifest = export_version(
            own_tensors(actor.model),
            Path(payload["path"]),
            job_id=self._job_id,
            policy_version=int(payload["policy_version"]),
            policy=actor.policy,
            max_shard_bytes=actor.job.update.max_shard_bytes,
            base=None if base is None else Path(base),
            exchange=exchange(),
        )
        if self._shards is None and torch.distributed.get_world_size() > 1:
            self._shards = OwnShards(Path(payload["path"]).parent)
        return {
            "owners": [] if self._shards is None else self._shards.urls,
            "bytes": manifest.num_bytes,
            "delta_bytes": manifest.delta_bytes,
            "num_shards": len(manifest.shards),
            "num_tensors": len(manifest.tensors),
            "seconds": time.perf_counter() - began_s,
        }

    def _send(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{path, groups: [GroupTransfer by rank]} -> {error}: a version to servers, in a group.

        Ranks that own no shard have no part in it. A server that hangs must not cost the ranks
        their state: what went wrong is an answer.
        """
        folder, rank = Path(payload["path"]), torch.distributed.get_rank()
        if rank >= len(payload["groups"]):
            return {"error": ""}
        group = GroupTransfer.model_validate(payload["groups"][rank])
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())

        def read(shard: ShardEntry) -> torch.Tensor:
            return torch.from_numpy(np.fromfile(folder / shard_file(shard.index), np.uint8))

        try:
            send_shards(group, manifest, read)
        except (TandemError, OSError) as err:
            log.warning("group_failed", error=str(err))
            return {"error": str(err)}
        return {"error": ""}

    def _checksum(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{path} -> {checksum}: the effective one of the whole version published in `path`."""
        actor = self.actor
        self._progress("checksum", actor.step)
        arch, threads = actor.architecture, actor.job.actor.num_threads
        folder = Path(payload["path"])
        return {"checksum": published_checksum(folder, arch, exchange(), num_threads=threads)}

    def close(self) -> None:
        """What is being written is finished first."""
        self._checkpoints.finish(wait=True)

    def _save(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{step, path, wait} -> {step, policy_version, complete}: one complete checkpoint folder.

        Unless `wait`, it is written in the background and appears during a later operation.
        """
        actor = self.actor
        if payload["step"] != actor.step:
            raise ValueError(f"step {payload['step']} cannot be saved: step {actor.step} is held")
        self._progress("save", actor.step)
        wait = payload.get("wait", True)
        self._checkpoints.start(
            Path(payload["path"]),
            model=actor.model,
            optimizer=actor.optimizer,
            progress=self._state(),
            copy=not wait,
        )
        complete = self._checkpoints.finish(wait=wait)
        return {**self._state(), "complete": complete}

    def _load(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{path, reference} -> {step, policy_version} of the checkpoint.

        `reference` is the checkpoint that the reference policy comes from, or null.
        """
        actor = self.actor
        self._progress("load", actor.step)
        if reference := payload.get("reference"):
            actor.load_reference(Path(reference))
        progress = checkpoint.load(
            Path(payload["path"]), model=actor.model, optimizer=actor.optimizer
        )
        actor.step, actor.policy_version = progress["step"], progress["policy_version"]
        return self._state()

    def _spans(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{max_spans} -> {ranks}: record so many from now on, or none any more; those so far."""
        return {"ranks": spans_of_ranks(int(payload["max_spans"]))}

    def _state(self) -> dict[str, int]:
        return {"step": self.actor.step, "policy_version": self.actor.policy_version}


def _facts() -> dict[str, Any]:
    """Of this rank: versions, where it runs, and on what."""
    has_device = torch.cuda.is_available()
    return {
        **process_facts(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name() if has_device else "cpu",
        "device_memory_bytes": torch.cuda.get_device_properties().total_memory if has_device else 0,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "variables": chosen_variables(os.environ),
    }
