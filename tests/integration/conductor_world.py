"""Everything around a conductor, as fakes on a real broker: ranks, servers, graders, evaluators.

The fake policy is a chain of digests: two runs that trained the same batches in the same order hold
the same weights, and only those.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import xxhash
from fastapi import FastAPI, HTTPException, Response
from redis.asyncio import Redis

from services.trainer.assembly import assemble
from services.trainer.conductor import Conductor
from services.trainer.config import ConductorConfig
from services.trainer.prompts import PromptSource
from services.trainer.ranks import RanksLost
from shared import topology
from shared.chat import EncodedPrompt
from shared.data import Row
from shared.errors import LeftHalfway, Rejected, RemoteError, Retryable
from shared.http import HttpClient
from shared.job import Job
from shared.messages import (
    EvalRequested,
    Event,
    JobAnnounced,
    Outcome,
    PromptGroup,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    TrainingBatch,
    TrainingSample,
    VersionSpan,
    WeightsAnnounced,
)
from shared.parity.attribution import RUNGS
from shared.parity.trace import Traced, TraceRequest
from shared.registry import Replica, register, unregister
from shared.streams import Consumer, announce, publish
from shared.tasks import end, wait_for_event
from shared.weights.manifest import MANIFEST_FILE, Manifest, ShardEntry, TensorEntry, shard_file
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, UpdateStatus

JOB_ID = "test-0000"
PUBLISHED = "0" * 32  # effective checksum of whatever the ranks publish
FIRST_WEIGHTS = hashlib.sha256(b"first").digest()
HALF_A_STEP = b"half of a step"
Grade = Callable[[PromptGroup, int], Outcome]


class Crash(Exception):
    """The conductor's process dies here."""


def make_job(**sections: dict[str, Any]) -> Job:
    document: dict[str, Any] = {
        "name": "test",
        "steps": 4,
        "seed": 7,
        "model": {"rollout_checkpoint": "/nowhere"},
        "data": {"path": "/nowhere/rows.jsonl"},
        "sampling": {
            "groups_per_step": 3,
            "samples_per_prompt": 2,
            "context_length": 64,
            "max_response_tokens": 8,
        },
        "update": {"probe_sequences": 1, "deadline_s": 5.0},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
        "bounds": {"step_deadline_s": 20.0},
        "preflight": {"enabled": False},
    }
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields if isinstance(fields, dict) else fields
    return Job.model_validate(document)


def make_source(job: Job, *, rows: Sequence[str] | None = None, job_id: str = JOB_ID):
    texts = rows or [f"problem {i}" for i in range(10)]
    return PromptSource(
        job_id,
        job,
        [Row(i, text, text, str(i), f"rows, line {i + 1}") for i, text in enumerate(texts)],
        lambda text: EncodedPrompt(text, list(text.encode())),
        lambda text: list(text.encode()),
        [0],
        256,
    )


@dataclass
class FakeRanks:
    """Ranks whose weights are a digest of all that they were trained on."""

    history: list[tuple[int, list[str]]]
    faults: list[str]  # "train_step:2" loses the ranks at the next second step they are asked for
    refuse_steps: set[int]  # those written negative when half of them is taken
    drift: float = 0.01
    weights: bytes = FIRST_WEIGHTS
    step: int = 0
    salt: bytes = b""  # other than empty: replays are not bit-exact
    references: dict[int, bytes] = field(default_factory=dict)  # by step that it was used in
    reference: bytes | None = None
    gates: dict[int, asyncio.Event] = field(default_factory=dict)  # a step waits for its own
    has_model: bool = False
    digested: list[int] = field(default_factory=list)  # versions whose checksum was asked for
    climbed: list[list[int]] = field(default_factory=list)  # versions other than the one held

    async def load(self, path: Path, reference: Path | None = None) -> int:
        saved = json.loads((path / "complete.json").read_text())
        if reference is not None:
            kept = json.loads((reference / "complete.json").read_text())
            self.reference = bytes.fromhex(kept["weights"])
        self.weights, self.step = bytes.fromhex(saved["weights"]), saved["step"]
        return self.step

    async def train_step(self, batch: bytes, *, is_replay: bool = False) -> dict[str, Any]:
        unpacked = TrainingBatch.unpack(batch)
        if gate := self.gates.get(unpacked.step):
            await gate.wait()
        self._fault(f"train_step:{unpacked.step}")
        if unpacked.step in self.refuse_steps:
            self.refuse_steps.discard(unpacked.step)
            raise Rejected("too many unusable log-probabilities")
        if -unpacked.step in self.refuse_steps:
            self.refuse_steps.discard(-unpacked.step)
            self.weights = HALF_A_STEP
            raise LeftHalfway("loss is nan after the step's first update")
        assert unpacked.step == self.step + 1
        assert self.weights != HALF_A_STEP
        if not unpacked.supervised:
            self.reference = self.reference or self.weights
            self.references[unpacked.step] = self.reference
        self.step += 1
        self.weights = hashlib.sha256(self.weights + batch + self.salt).digest()
        self.history.append((self.step, unpacked.group_ids))
        sampled = [sample.sampler_logprobs for sample in unpacked.samples]
        return {
            "delta_logprob_mean": self.drift,
            "loss": 0.5,
            "seconds": {"optimizer": 0.0},
            "logprobs": (np.concatenate(sampled) - self.drift).astype("<f4").tobytes(),
        }

    async def export(
        self, policy_version: int, path: Path, base: Path | None = None
    ) -> dict[str, Any]:
        self._fault(f"export:{policy_version}")
        digest = xxhash.xxh3_128(self.weights).hexdigest()
        (path / shard_file(0)).write_bytes(self.weights)
        tensor = TensorEntry(
            name="w", shape=[32], dtype="I8", shard=0, offset=0, num_bytes=32, checksum=digest
        )
        manifest = Manifest(
            job_id=JOB_ID,
            policy_version=policy_version,
            shards=[ShardEntry(index=0, num_bytes=32, checksum=digest)],
            tensors=[tensor],
        )
        (path / MANIFEST_FILE).write_text(manifest.model_dump_json())
        return {}

    async def effective_checksum(self, path: Path) -> str:
        self._fault("checksum")
        if "damaged" in self.faults:
            self.faults.remove("damaged")
            raise RemoteError("WeightsCorrupt", "w is not what was written")
        assert (path / shard_file(0)).exists()
        self.digested.append(int(path.name[1:]))
        return PUBLISHED

    async def save(self, step: int, path: Path, *, wait: bool) -> dict[str, Any]:
        self._fault(f"save:{step}")
        assert self.weights != HALF_A_STEP
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        saved = {"weights": self.weights.hex(), "step": self.step}
        (path / "complete.json").write_text(json.dumps(saved))
        return {}

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, rounding: str = "own"
    ) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    async def trace(self, request: bytes, policy_version: int) -> bytes:
        asked = TraceRequest.unpack(request)
        return Traced(policy_version=policy_version, states=[{} for _ in asked.sequences]).pack()

    async def climb(
        self, samples: Sequence[bytes], temperature: float, folders: Mapping[int, Path]
    ) -> dict[str, list[float]]:
        """One rung is as good as another."""
        self._fault(f"climb after {self.step}")
        if not self.has_model:
            raise ValueError("these ranks have no model")
        self.climbed.append(sorted(folders))
        sizes = [len(TrainingSample.unpack(body).sampler_logprobs) for body in samples]
        return {rung: [-1.0] * sum(sizes) for rung in RUNGS}

    async def spans(self, max_spans: int) -> list[dict[str, Any]]:
        self._fault("spans")
        return []

    async def stop(self) -> None:
        return None

    def _fault(self, point: str) -> None:
        if point in self.faults:
            self.faults.remove(point)
            raise RanksLost(f"killed at {point}")


class FakeServer:
    """A rollout replica: the update transaction over HTTP, and a worker that samples."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.url = f"http://{name}"
        self.pid = os.getpid()
        self.version: int | None = None
        self.weights: dict[int, bytes] = {}  # every version that it ever served
        self.staged: dict[int, bytes] = {}
        self.fail_commits = 0
        self.refuses: set[int] = set()  # versions
        self.checksum = PUBLISHED  # of whatever it serves
        self.checks = True  # what is expected, before it serves a version
        self.lies = False  # takes every version, whatever is expected
        self.garbles: tuple[int, str] | None = None  # status and JSON of all answers to commits
        self.activating: int | None = None  # whose commit goes on, though nobody waits for it
        self.num_polls = 0
        self.staging_s = 0.0
        self.hangs_in_commit = False
        self.lose_answers = 0  # of commits: the connection is cut after they are done
        self.freezes_then = False
        self.restarts = 0
        self.frozen = False  # its HTTP answers nothing in time
        self.samples = True
        self.app = self._build_app()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._register()
        worker = self._sample if self.samples else self._stop.wait
        self._tasks = [asyncio.create_task(self._keep_registered()), asyncio.create_task(worker())]

    async def kill(self) -> None:
        """Gone without a word, weights and all; its lease is taken away at once."""
        self._stop.set()
        for task in self._tasks:
            await end(task)
        await unregister(self.world.redis, "rollout", self.name)

    async def _register(self) -> None:
        await register(
            self.world.redis,
            Replica(
                service="rollout",
                name=self.name,
                url=self.url,
                pid=self.pid,
                job_id=JOB_ID,
                state="waiting_for_weights" if self.version is None else "serving",
                policy_version=self.version,
            ),
        )

    async def _keep_registered(self) -> None:
        while not self._stop.is_set():
            await self._register()
            await wait_for_event(self._stop, 0.2)

    async def _sample(self) -> None:
        consumer = Consumer(
            self.world.redis,
            topology.prompts(JOB_ID),
            topology.SAMPLERS,
            self.name,
            block_s=0.1,
            retry_s=0.05,
        )
        await consumer.run(self._sample_one, stop=self._stop, concurrency=2, drain_s=1.0)

    async def _sample_one(self, body: bytes) -> None:
        prompt = PromptGroup.unpack(body)
        held = await self.world.redis.hget(topology.holds(JOB_ID), self.name)
        current = await self.world.redis.get(topology.weights_current(JOB_ID))
        newest = WeightsAnnounced.unpack(current).policy_version if current else 0
        served = self.version
        if served is None or held is not None or served < max(newest, prompt.min_policy_version):
            raise Retryable("not yet")
        await asyncio.sleep(self.world.sampling_s)
        group = await self.world.complete(sampled(prompt, served, replica=self.name))
        await publish(self.world.redis, topology.rollouts(JOB_ID), group.pack())

    def _build_app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/info")
        async def info() -> dict[str, Any]:
            await self._freeze()
            return {
                "policy_version": self.version,
                "job_id": JOB_ID,
                "effective_checksum": self.checksum,
            }

        @app.post("/v1/weights/updates", status_code=202)
        async def begin(asked: BeginUpdate) -> UpdateStatus:
            await self._freeze()
            if self.version is not None and not (asked.is_rollback or asked.version > self.version):
                raise HTTPException(409, f"{self.version} is served")
            if asked.version == self.activating:
                return UpdateStatus(version=asked.version, state="activating", total_bytes=32)
            path = self.world.run_dir / "weights" / f"v{asked.version:08d}" / shard_file(0)
            content = path.read_bytes()
            assert xxhash.xxh3_128(content).hexdigest() == asked.manifest.shards[0].checksum
            self.staged[asked.version] = content
            self.staged_at_s = time.monotonic() + self.staging_s
            return UpdateStatus(version=asked.version, state="staging", total_bytes=32)

        @app.get("/v1/weights/updates/{version}")
        async def progress(version: int) -> UpdateStatus:
            await self._freeze()
            self.num_polls += 1
            if version in (self.activating, self.version):
                state = "activating" if version == self.activating else "active"
                return UpdateStatus(version=version, state=state, total_bytes=32)
            if time.monotonic() < self.staged_at_s:
                return UpdateStatus(version=version, state="staging", total_bytes=32)
            return UpdateStatus(version=version, state="staged", staged_bytes=32, total_bytes=32)

        @app.post("/v1/weights/updates/{version}/commit", response_model=None)
        async def commit(version: int, asked: CommitUpdate) -> CommitResult | Response:
            await self._freeze()
            if self.garbles:
                status, body = self.garbles
                return Response(body, status, media_type="application/json")
            if self.hangs_in_commit:
                self.world.hanging_commits += 1
                await asyncio.sleep(60)
            expected = self.checksum if self.lies else asked.effective_checksum or self.checksum
            if version == self.version:
                if expected != self.checksum:
                    self.restarts, self.version = self.restarts + 1, None
                    await self._register()
                    raise HTTPException(412, f"{self.checksum}, expected was {expected}")
                return self._result(version)
            if version not in self.staged:
                raise HTTPException(404, f"version {version} is not being updated to")
            await self._overlap(version)
            if self.fail_commits or version in self.refuses:
                self.fail_commits = max(0, self.fail_commits - 1)
                raise HTTPException(500, "the probe failed")
            if self.checks and expected != self.checksum:
                raise HTTPException(412, f"{self.checksum}, expected was {expected}")
            assert asked.probe is not None or self.world.job.preflight.enabled
            self.world.commits.append((self.name, version))
            self.version = version
            self.weights[version] = self.staged.pop(version)
            await self._register()
            return self._result(version)

        @app.delete("/v1/weights/updates/{version}")
        async def abort(version: int) -> None:
            self.staged.pop(version, None)

        return app

    def _result(self, version: int) -> CommitResult:
        phases = dict.fromkeys(("pause_s", "load_s", "restore_s", "probe_s", "resume_s"), 0.0)
        return CommitResult(
            version=version, effective_checksum=self.checksum, probe_mean_abs_delta=0.0, **phases
        )

    def loses(self, path: str) -> bool:
        """Whether the answer of this request gets lost."""
        if not path.endswith("/commit") or not self.lose_answers:
            return False
        self.lose_answers -= 1
        self.frozen |= self.freezes_then
        return True

    async def _overlap(self, version: int) -> None:
        """Take a while, and note commits of a version that nobody has accepted yet."""
        world = self.world
        unaccepted = all(accepted != version for _, accepted in world.commits)
        world.committing[version] += 1
        if unaccepted:
            world.most_first_commits = max(world.most_first_commits, world.committing[version])
        await asyncio.sleep(world.commit_s)
        world.committing[version] -= 1

    async def _freeze(self) -> None:
        if self.frozen:
            await asyncio.sleep(60)


def sampled(prompt: PromptGroup, version: int, *, replica: str = "rollout-0") -> RolloutGroup:
    """The completions of a prompt: a function of its seed and the version."""
    rollouts = []
    for index in range(prompt.num_samples):
        noise = np.random.default_rng([prompt.seed, index, version])
        token_ids = noise.integers(1, 256, size=4)
        rollouts.append(
            Rollout(
                rollout_id=f"{prompt.group_id}.{index}",
                response_token_ids=token_ids,
                logprobs=-noise.random(4),
                version_spans=[VersionSpan(policy_version=version, num_tokens=4)],
                finish_reason="stop",
                text=f"{index}",
            )
        )
    return RolloutGroup(
        prompt=prompt, replica=replica, rollouts=rollouts, sampled_at_s=0.0, sampling_s=0.0
    )


async def as_it_is(group: RolloutGroup) -> RolloutGroup:
    return group


def graded(group: RolloutGroup, grade: Grade) -> ScoredGroup:
    outcomes = [grade(group.prompt, index) for index in range(group.prompt.num_samples)]
    return ScoredGroup(group=group, outcomes=outcomes, grading_s=0.0)


def alternating(prompt: PromptGroup, index: int) -> Outcome:
    """Every fourth draw is all wrong; the others differ within the group."""
    return Score(value=0.0 if prompt.draw % 4 == 3 else float(index % 2))


@dataclass
class World:
    redis: Redis
    run_dir: Path
    job: Job
    source: PromptSource
    grade: Grade = alternating
    complete: Callable[[RolloutGroup], Awaitable[RolloutGroup]] = as_it_is  # before it is out
    sampling_s: float = 0.0
    history: list[tuple[int, list[str]]] = field(default_factory=list)
    rank_faults: list[str] = field(default_factory=list)
    refuse_steps: set[int] = field(default_factory=set)
    commits: list[tuple[str, int]] = field(default_factory=list)
    commit_s: float = 0.0
    hanging_commits: int = 0
    committing: Counter[int] = field(default_factory=Counter)  # by version
    most_first_commits: int = 0  # at the same time, of a version that no server had accepted
    servers: dict[str, FakeServer] = field(default_factory=dict)
    evaluated: list[tuple[str, int, dict[str, int]]] = field(default_factory=list)
    answer_evals: bool = True
    refuse_evals: str = ""  # why their requests are buried
    drift: float = 0.01
    salt: bytes = b""
    has_model: bool = False
    references: dict[int, bytes] = field(default_factory=dict)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)  # of steps of the ranks
    digested: list[int] = field(default_factory=list)  # by ranks, over all conductors
    ranks: FakeRanks | None = None
    config: ConductorConfig = field(
        default_factory=lambda: ConductorConfig(
            settle_grace_s=0.5, hold_grace_s=1.0, quiet_s=1.0, goodbye_s=3.0
        )
    )

    async def add_server(self, name: str, **traits: Any) -> FakeServer:
        server = FakeServer(self, name)
        for trait, value in traits.items():
            setattr(server, trait, value)
        self.servers[name] = server
        await server.start()
        return server

    async def until_served(self, version: int, *, by: str = "rollout-0") -> None:
        """Wait until a server serves that version or a later one."""
        async with asyncio.timeout(20):
            while (self.servers[by].version or 0) < version:  # noqa: ASYNC110  a plain attribute
                await asyncio.sleep(0.02)

    async def grade_forever(self, stop: asyncio.Event) -> None:
        async def handle(body: bytes) -> None:
            group = RolloutGroup.unpack(body)
            scored = graded(group, self.grade).pack()
            await publish(self.redis, topology.groups(JOB_ID), scored)

        stream, name = topology.rollouts(JOB_ID), "grader"
        consumer = Consumer(self.redis, stream, topology.GRADERS, name, block_s=0.1)
        await consumer.run(handle, stop=stop, concurrency=4, drain_s=1.0)

    async def evaluate_forever(self, stop: asyncio.Event) -> None:
        async def handle(body: bytes) -> None:
            asked = EvalRequested.unpack(body)
            holds = await self.redis.hgetall(topology.holds(JOB_ID))
            pinned = {name.decode(): int(version) for name, version in holds.items()}
            self.evaluated.append((asked.eval_id, asked.policy_version, pinned))
            if self.refuse_evals:
                raise Rejected(self.refuse_evals)
            if self.answer_evals:
                await self.tell("eval_finished", eval_id=asked.eval_id, pass_at_k={"1": 0.5})

        stream, name = topology.evals(JOB_ID), "evaluator"
        consumer = Consumer(self.redis, stream, topology.EVALUATORS, name, block_s=0.1)
        await consumer.run(handle, stop=stop, drain_s=1.0)

    async def tell(self, name: str, **fields: Any) -> None:
        event = Event(
            name=name, job_id=JOB_ID, service="test", replica="t", at_s=1.0, fields=fields
        )
        await announce(self.redis, topology.events(JOB_ID), event.pack())

    def conductor(self, *, crash_at: list[str] | None = None) -> Conductor:
        """A new one, as a new process would make it. `crash_at` loses the points that were hit."""
        points = crash_at if crash_at is not None else []

        def on_point(point: str) -> None:
            if points and points[0] == point:
                points.pop(0)
                raise Crash(point)

        async def start_ranks() -> FakeRanks:
            self.ranks = FakeRanks(
                self.history,
                self.rank_faults,
                self.refuse_steps,
                self.drift,
                salt=self.salt,
                references=self.references,
                has_model=self.has_model,
                gates=self.gates,
                digested=self.digested,
            )
            return self.ranks

        parts = assemble(
            self.redis,
            source=self.source,
            run_dir=self.run_dir,
            start_ranks=start_ranks,
            http=HttpClient(attempts=1, transport=_ToServers(self)),
            trainer_url="http://trainer",
            shards_url="http://trainer-shards",
            replica="trainer-0",
            config=self.config,
        )
        return Conductor(parts, on_point=on_point)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Fields of the events of that name in the run's file."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        bodies = [json.loads(line) for line in lines]
        return [body["fields"] for body in bodies if body["name"] == name]

    async def announced(self) -> JobAnnounced:
        body = await self.redis.get(topology.JOB_CURRENT)
        return JobAnnounced.unpack(body)


class _ToServers(httpx.AsyncBaseTransport):
    """Requests reach the fake server that the address names."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self._world.servers.get(request.url.host)
        if server is None:
            raise httpx.ConnectError(f"no {request.url.host}")
        timeout_s = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(min(timeout_s, 1.0) if server.frozen else timeout_s):
                answer = await httpx.ASGITransport(server.app).handle_async_request(request)
                if server.loses(request.url.path):
                    raise httpx.ReadError("the connection was cut")
                return answer
        except TimeoutError as err:
            raise httpx.ReadTimeout("no answer") from err


@contextlib.asynccontextmanager
async def running_world(
    redis: Redis, run_dir: Path, *, job: Job, rows: Sequence[str] | None = None, servers: int = 1
) -> AsyncIterator[World]:
    """Servers, a grader and an evaluator for conductors of `job`."""
    os.makedirs(run_dir)  # noqa: PTH103
    world = World(redis, run_dir, job, make_source(job, rows=rows))
    stop = asyncio.Event()
    loops: list[Callable[[asyncio.Event], Awaitable[None]]] = [
        world.grade_forever,
        world.evaluate_forever,
    ]
    tasks = [asyncio.create_task(loop(stop)) for loop in loops]
    for index in range(servers):
        await world.add_server(f"rollout-{index}")
    try:
        yield world
    finally:
        stop.set()
        for server in world.servers.values():
            await server.kill()
        for task in tasks:
            await end(task)


async def run_to_end(world: World, *, crash_at: list[str] | None = None) -> int:
    """Run conductors until one comes to the job's end; how many it took."""
    for attempt in range(1, 30):
        conductor = world.conductor(crash_at=crash_at)
        try:
            await asyncio.wait_for(conductor.run(), 40)
        except Crash:
            await conductor.close(None)
        else:
            await conductor.close("finished")
            return attempt
    raise AssertionError("it never ends")
