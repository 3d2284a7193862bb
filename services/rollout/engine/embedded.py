"""The engine child: a plain loop that steps the scheduler and answers its service in between.

Started as `python -m services.rollout.engine.embedded ADDRESS PARENT_PID`. Everything that an
operation changes, it changes between two steps, so an update needs no lock: the step boundary is
the pause.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.routes import Recording
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import (
    LoadedVersion,
    Stopwatch,
    build_version,
    check_effective,
    read_canonical,
    run_probe,
)
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_trace import traced_states
from services.rollout.models.deepseek_v4_weights import derive
from shared.channel import Request, SyncChannel
from shared.errors import ChannelClosed
from shared.parity.trace import Traced, TraceRequest
from shared.process import die_with_parent
from shared.quant.activation import ActivationQuant, embedded_rounding
from shared.telemetry import configure_logging
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitUpdate

log = structlog.get_logger()

_IDLE_S = 0.5
_STATS_S = 0.5
_TIDY_IDLE_S = 10.0
_TIDY_BUSY_S = 120.0


class EmbeddedEngine:
    """The operations of the channel, without the channel: tests call them directly."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.paused = False
        self.num_rebuilds = 0
        self.scheduler = Scheduler(
            Sampler(spec.arch, rounding_of(spec)),
            limits=Limits(max_running=spec.max_running_requests, max_tokens=spec.context_length),
            recording=Recording(spec.record_experts, spec.record_entries),
        )
        self._build = derive

    @property
    def policy_version(self) -> int | None:
        version = self.scheduler.version
        return None if version is None else version.policy_version

    def activate(
        self, manifest: Manifest, folder: Path, commit: CommitUpdate, *, asked_at_s: float
    ) -> tuple[dict[str, Any], list[tuple[str, list[Completion]]]]:
        """Serve a staged version, or raise `WeightsCorrupt` and serve on as before.

        Gives the fields of a CommitResult, and requests that the pause mode ended.
        """
        watch = Stopwatch(asked_at_s)
        watch.lap("pause_s")
        canonical = read_canonical(manifest, folder)
        watch.lap("load_s")
        self.num_rebuilds += 1
        version = build_version(
            manifest.policy_version, self.spec.arch, canonical, build=self._build
        )
        watch.lap("restore_s")
        delta = self._prove(version, commit)
        watch.lap("probe_s")
        ended = self.scheduler.switch(version, commit.pause_mode)
        watch.lap("resume_s")
        log.info("version_active", policy_version=version.policy_version, **watch.seconds)
        result = {
            "version": version.policy_version,
            **watch.seconds,
            "probe_mean_abs_delta": delta,
            "effective_checksum": version.checksum,
        }
        return result, ended

    def score(
        self, sequences: list[list[int]], temperature: float, policy_version: int | None
    ) -> tuple[int, list[np.ndarray]]:
        """The version that scored, and FP32 log-probabilities of tokens 1.. of each sequence."""
        version = self.scheduler.require(
            policy_version if policy_version is not None else self.policy_version or 0
        )
        arrays = [np.array(sequence, np.int64) for sequence in sequences]
        return version.policy_version, self.scheduler.score(arrays, temperature, version=version)

    def trace(self, request: TraceRequest) -> Traced:
        """Inner states of given sequences under the version that is served."""
        wanted = request.policy_version
        version = self.scheduler.require(self.policy_version or 0 if wanted is None else wanted)
        states = traced_states(self.scheduler.model, version.derived, request)
        return Traced(policy_version=version.policy_version, states=states)

    def _prove(self, version: LoadedVersion, commit: CommitUpdate) -> float | None:
        delta = None
        if commit.probe is not None:
            delta = run_probe(
                commit.probe,
                lambda sequences: self.scheduler.score(sequences, 1.0, version=version),
            )
        check_effective(self.spec.arch, version)
        return delta


def rounding_of(spec: EngineSpec) -> ActivationQuant:
    return embedded_rounding(spec.arch.weight_format, activations=spec.quantise_activations)


class _Loop:
    """Requests of the channel in, answers and statistics out, steps in between."""

    def __init__(self, engine: EmbeddedEngine, channel: SyncChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._waiting: dict[str, int] = {}  # request of the scheduler -> of the channel
        self._stats_at_s = 0.0
        self._tidied_at_s = time.monotonic()
        self._stopping = False
        self._operations: dict[str, Callable[[Request], None]] = {
            "generate": self._generate,
            "abort": self._abort,
            "score": self._score,
            "trace": self._trace,
            "activate": self._activate,
            "pause": self._pause,
            "continue": self._continue,
            "stop": self._stop,
        }

    def run(self) -> None:
        scheduler = self._engine.scheduler
        while not self._stopping:
            busy = scheduler.has_work and not self._engine.paused
            while request := self._channel.recv(0.0 if busy else _IDLE_S):
                self._handle(request)
                busy = scheduler.has_work and not self._engine.paused
                if self._stopping:
                    return
            if busy:
                self._answer(scheduler.step())
            self._notify_stats()
            self._tidy(busy)

    def _handle(self, request: Request) -> None:
        try:
            self._operations[request.op](request)
        except Exception as err:  # noqa: BLE001  whoever asked is told; the engine goes on
            log.warning("operation_failed", op=request.op, error=repr(err))
            self._channel.fail(request.id, err)

    def _generate(self, request: Request) -> None:
        group = GroupRequest.from_payload(request.payload)
        self._engine.scheduler.add(group)
        self._waiting[group.request_id] = request.id

    def _abort(self, request: Request) -> None:
        request_id = request.payload["request_id"]
        completions = self._engine.scheduler.abort(request_id)
        if completions is not None:
            self._answer([(request_id, completions)])
        self._channel.reply(request.id)

    def _score(self, request: Request) -> None:
        payload = request.payload
        version, scores = self._engine.score(
            payload["sequences"], payload["temperature"], payload["policy_version"]
        )
        logprobs = [one.astype("<f4").tobytes() for one in scores]
        self._channel.reply(request.id, {"policy_version": version, "logprobs": logprobs})

    def _trace(self, request: Request) -> None:
        traced = self._engine.trace(TraceRequest.unpack(request.payload["request"]))
        self._channel.reply(request.id, {"traced": traced.pack()})

    def _activate(self, request: Request) -> None:
        folder = Path(request.payload["folder"])
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        commit = CommitUpdate.model_validate_json(request.payload["commit"])
        result, ended = self._engine.activate(
            manifest, folder, commit, asked_at_s=request.payload["asked_at_s"]
        )
        self._channel.reply(request.id, result)
        self._answer(ended)

    def _pause(self, request: Request) -> None:
        self._engine.paused = True
        self._channel.reply(request.id)

    def _continue(self, request: Request) -> None:
        self._engine.paused = False
        self._channel.reply(request.id)

    def _stop(self, request: Request) -> None:
        self._answer(list(self._engine.scheduler.abort_all()))
        self._stopping = True
        self._channel.reply(request.id)

    def _answer(self, done: list[tuple[str, list[Completion]]]) -> None:
        for request_id, completions in done:
            payload = {"completions": [one.to_payload() for one in completions]}
            self._channel.reply(self._waiting.pop(request_id), payload)

    def _notify_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at_s < _STATS_S:
            return
        self._stats_at_s = now
        scheduler = self._engine.scheduler
        self._channel.notify(
            "stats",
            {
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "tokens_sampled": scheduler.tokens_sampled,
            },
        )

    def _tidy(self, busy: bool) -> None:
        """Collect cycles when nobody waits for it, or when nobody ever did not."""
        since_s = time.monotonic() - self._tidied_at_s
        if since_s > (_TIDY_BUSY_S if busy else _TIDY_IDLE_S):
            gc.collect()
            self._tidied_at_s = time.monotonic()


def main(argv: list[str]) -> None:
    address, parent_pid = argv
    die_with_parent(int(parent_pid))
    configure_logging("rollout-engine")
    channel = SyncChannel.connect(address)
    first = channel.recv(60.0)
    if first is None or first.op != "start":
        raise SystemExit(f"the service was expected to start the engine, not {first}")
    try:
        engine = EmbeddedEngine(EngineSpec.from_payload(first.payload))
    except Exception as err:
        channel.fail(first.id, err)
        raise SystemExit(1) from err
    channel.reply(first.id, {"cache_bytes": engine.scheduler.cache_bytes})
    # What exists now lives as long as the process; collections in the middle of a step cost 4 %.
    gc.freeze()
    gc.disable()
    try:
        _Loop(engine, channel).run()
    except ChannelClosed:
        log.info("service_gone")


if __name__ == "__main__":
    main(sys.argv[1:])
