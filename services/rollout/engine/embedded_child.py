"""The embedded engine's process: a plain loop that steps the scheduler and answers its service.

Started as `python -m services.rollout.engine.embedded_child ADDRESS PARENT_PID`. What an
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.rollout.engine.child import begin, told_spans
from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.state_check import PrefixKept
from services.rollout.engine.weights import Candidate, receive_version
from shared.channel import Request, SyncChannel
from shared.environment import process_facts
from shared.errors import ChannelClosed
from shared.parity.trace import TraceRequest
from shared.spans import span
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitUpdate, GroupTransfer

log = structlog.get_logger()

_IDLE_S = 0.5
_UPDATING_S = 0.005
_SWITCH_INTERVAL_S = 0.0005  # the sampling thread must not wait long for one that builds
_STATS_S = 0.5
_TIDY_IDLE_S = 10.0
_TIDY_BUSY_S = 120.0


def _staged(request: Request) -> tuple[Manifest, Path, CommitUpdate]:
    folder = Path(request.payload["folder"])
    manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
    return manifest, folder, CommitUpdate.model_validate_json(request.payload["commit"])


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
            "spans": self._spans,
            "environment": self._environment,
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
                with span("step", "steps", running=scheduler.num_running):
                    done = scheduler.step()
                self._answer(done)
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
        with span("score", "steps", sequences=len(payload["sequences"])):
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
            activation.result = self._switched(activation)
        if activation.result is None:
            self._activation = None
            return
        if self._engine.scheduler.is_recomputing and not self._engine.paused:
            return
        activation.result["resume_s"] = time.monotonic() - activation.resumes_since_s
        self._activation = None
        self._channel.reply(activation.request_id, activation.result)

    def _switched(self, activation: _Activation) -> dict[str, Any] | None:
        """What the switch came to. None if there was none: whoever asked is told why."""
        ended: list[tuple[str, list[Completion]]] = []
        try:
            candidate = activation.building.result()
            result, ended = self._engine.switch(candidate, activation.commit)
        except Exception as err:  # noqa: BLE001  whoever asked is told; the old version serves
            log.warning("version_refused", error=repr(err))
            ended = err.ended if isinstance(err, PrefixKept) else []
            self._channel.fail(activation.request_id, err)
            return None
        finally:
            self._answer(ended)
        activation.resumes_since_s = time.monotonic()
        return result

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

    def _spans(self, request: Request) -> None:
        self._channel.reply(request.id, told_spans(request.payload["max_spans"]))

    def _environment(self, request: Request) -> None:
        self._channel.reply(request.id, process_facts())

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
