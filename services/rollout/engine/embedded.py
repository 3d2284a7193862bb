"""The engine child: a plain loop that steps the scheduler and answers its service in between.

Started as `python -m services.rollout.engine.embedded ADDRESS PARENT_PID`. Everything that an
operation changes, it changes between two steps, so an update needs no lock: the step boundary is
the pause. A new version is built and proven in a thread, while the old one goes on sampling:

    activate ──> thread: map, derive, check, probe ──> next step boundary: switch ──> recompute
                 (sampling goes on)                    (pause_s)                      (resume_s)
"""

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from services.rollout.engine.child import begin
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.routes import Recording
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import (
    Candidate,
    LoadedVersion,
    Stopwatch,
    build_version,
    check_effective,
    check_replicas,
    read_canonical,
    receive_version,
    run_probe,
)
from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_trace import traced_states
from services.rollout.models.deepseek_v4_weights import derive
from shared.channel import Request, SyncChannel
from shared.errors import ChannelClosed
from shared.models.deepseek_v4.checkpoint import load_release
from shared.parity.trace import Traced, TraceRequest
from shared.quant.activation import ActivationQuant, embedded_rounding
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitUpdate, GroupTransfer

log = structlog.get_logger()

_IDLE_S = 0.5
_UPDATING_S = 0.005
_SWITCH_INTERVAL_S = 0.0005  # the sampling thread must not wait long for one that builds
_STATS_S = 0.5
_TIDY_IDLE_S = 10.0
_TIDY_BUSY_S = 120.0


class EmbeddedEngine:
    """The operations of the channel, without the channel: tests call them directly."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.paused = False
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
        self, manifest: Manifest, folder: Path, commit: CommitUpdate
    ) -> tuple[dict[str, Any], list[tuple[str, list[Completion]]]]:
        """Serve a staged version, or raise `WeightsCorrupt` and serve on as before.

        Gives the fields of a CommitResult, and requests that the pause mode ended.
        """
        return self.switch(self.prepare(manifest, folder, commit), commit)

    def prepare(self, manifest: Manifest, folder: Path, commit: CommitUpdate) -> Candidate:
        """Build and prove a staged version beside what is served; safe in a thread of its own."""
        watch = Stopwatch()
        canonical = read_canonical(manifest, folder)
        watch.lap("load_s")
        version = build_version(
            manifest.policy_version, self.spec.arch, canonical, build=self._build
        )
        watch.lap("restore_s")
        delta = self._prove(version, commit)
        watch.lap("probe_s")
        # From here on nobody needs what it was derived from.
        return Candidate(replace(version, canonical={}), watch.seconds, delta)

    def rehearse(self, manifest: Manifest, folder: Path, commit: CommitUpdate) -> dict[str, Any]:
        """What `activate` would give, with nothing switched."""
        return _result(self.prepare(manifest, folder, commit), {"pause_s": 0.0})

    def switch(
        self, candidate: Candidate, commit: CommitUpdate
    ) -> tuple[dict[str, Any], list[tuple[str, list[Completion]]]]:
        """Serve a proven version from here on: all that happens in the pause."""
        watch, version = Stopwatch(), candidate.version
        ended = self.scheduler.switch(version, commit.pause_mode)
        watch.lap("pause_s")
        log.info("version_active", policy_version=version.policy_version, **candidate.seconds)
        return _result(candidate, watch.seconds), ended

    def load(self, source: Path, policy_version: int) -> str:
        """Serve a release directory, or a version's folder, of this disk; its checksum.

        `WeightsCorrupt` or `CheckpointInvalid` names the tensor or the shard that is off.
        """
        manifest = source / MANIFEST_FILE
        if manifest.is_file():
            found = Manifest.model_validate_json(manifest.read_bytes())
            canonical = read_canonical(found, source)
        else:
            canonical = load_release(source, self.spec.arch)
        version = build_version(policy_version, self.spec.arch, canonical, build=self._build)
        check_effective(self.spec.arch, version)
        self.scheduler.switch(version, "in_place")
        return version.checksum

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
            prober = self.scheduler.prober()
            delta = run_probe(
                commit.probe, lambda sequences: prober.score(sequences, 1.0, version=version)
            )
        check_effective(self.spec.arch, version)
        check_replicas(version, commit.effective_checksum)
        return delta


def _result(candidate: Candidate, pause: dict[str, float]) -> dict[str, Any]:
    """The fields of a CommitResult, before anybody knows when sampling goes on."""
    return {
        "version": candidate.version.policy_version,
        **candidate.seconds,
        **pause,
        "resume_s": 0.0,
        "probe_mean_abs_delta": candidate.probe_delta,
        "effective_checksum": candidate.version.checksum,
    }


def _staged(request: Request) -> tuple[Manifest, Path, CommitUpdate]:
    folder = Path(request.payload["folder"])
    manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    return manifest, folder, CommitUpdate.model_validate_json(request.payload["commit"])


def rounding_of(spec: EngineSpec) -> ActivationQuant:
    return embedded_rounding(spec.arch.weight_format, activations=spec.quantise_activations)


@dataclass(slots=True)
class _Activation:
    """One update in progress: a candidate that is being built, then a state that is recomputed."""

    request_id: int
    commit: CommitUpdate
    building: Future[Candidate]
    result: dict[str, Any] | None = None  # of the switch
    resumes_since_s: float = 0.0


class _Loop:
    """Requests of the channel in, answers and statistics out, steps in between."""

    def __init__(self, engine: EmbeddedEngine, channel: SyncChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._waiting: dict[str, int] = {}  # request of the scheduler -> of the channel
        self._stats_at_s = 0.0
        self._tidied_at_s = time.monotonic()
        self._stopping = False
        self._builder = ThreadPoolExecutor(1, "candidate")
        self._receiving: tuple[int, Future[None]] | None = None
        self._activation: _Activation | None = None
        self._operations: dict[str, Callable[[Request], None]] = {
            "generate": self._generate,
            "abort": self._abort,
            "score": self._score,
            "trace": self._trace,
            "receive": self._receive,
            "activate": self._activate,
            "load": self._load,
            "rehearse": self._rehearse,
            "pause": self._pause,
            "continue": self._continue,
            "stop": self._stop,
        }

    def run(self) -> None:
        scheduler = self._engine.scheduler
        while not self._stopping:
            busy = scheduler.has_work and not self._engine.paused
            updating = self._activation or self._receiving
            idle_s = _UPDATING_S if updating else _IDLE_S
            while request := self._channel.recv(0.0 if busy else idle_s):
                self._handle(request)
                busy = scheduler.has_work and not self._engine.paused
                if self._stopping:
                    return
            if self._receiving is not None:
                self._go_on_receiving(*self._receiving)
            if self._activation is not None:
                self._go_on_activating(self._activation)
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

    def _receive(self, request: Request) -> None:
        if self._receiving is not None:
            raise ValueError("another version is being received")
        folder = Path(request.payload["folder"])
        group = GroupTransfer.model_validate_json(request.payload["group"])
        self._receiving = (request.id, self._builder.submit(receive_version, folder, group))

    def _go_on_receiving(self, request_id: int, receiving: Future[None]) -> None:
        if not receiving.done():
            return
        self._receiving = None
        if error := receiving.exception():
            self._channel.fail(request_id, error)
        else:
            self._channel.reply(request_id)

    def _activate(self, request: Request) -> None:
        manifest, folder, commit = _staged(request)
        if self._activation is not None:
            raise ValueError("another version is being activated")
        building = self._builder.submit(self._engine.prepare, manifest, folder, commit)
        self._activation = _Activation(request.id, commit, building)

    def _go_on_activating(self, activation: _Activation) -> None:
        """Between two steps: switch once the candidate is ready, answer once sampling goes on."""
        if not activation.building.done():
            return
        if activation.result is None:
            try:
                candidate = activation.building.result()
            except Exception as err:  # noqa: BLE001  whoever asked is told; the old version serves
                log.warning("version_refused", error=repr(err))
                self._activation = None
                self._channel.fail(activation.request_id, err)
                return
            activation.result, ended = self._engine.switch(candidate, activation.commit)
            activation.resumes_since_s = time.monotonic()
            self._answer(ended)
        if self._engine.scheduler.is_recomputing and not self._engine.paused:
            return
        activation.result["resume_s"] = time.monotonic() - activation.resumes_since_s
        self._activation = None
        self._channel.reply(activation.request_id, activation.result)

    def _load(self, request: Request) -> None:
        version = request.payload["policy_version"]
        checksum = self._engine.load(Path(request.payload["source"]), version)
        self._channel.reply(request.id, {"checksum": checksum})

    def _rehearse(self, request: Request) -> None:
        self._channel.reply(request.id, self._engine.rehearse(*_staged(request)))

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
    channel, first = begin(argv)
    try:
        engine = EmbeddedEngine(EngineSpec.from_payload(first.payload))
    except Exception as err:
        channel.fail(first.id, err)
        raise SystemExit(1) from err
    channel.reply(first.id, {"cache_bytes": engine.scheduler.cache_bytes})
    # What exists now lives as long as the process; collections in the middle of a step cost 4 %.
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        _Loop(engine, channel).run()
    except ChannelClosed:
        log.info("service_gone")


if __name__ == "__main__":
    main(sys.argv[1:])
