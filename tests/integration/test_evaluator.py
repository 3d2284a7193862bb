"""The evaluator against a real broker and two small servers that speak the services' HTTP.

The fake rollout server answers `<problem's length>` or a wrong number by its seed, at one policy
version; the fake reward server compares strings. What is real: streams, registry, HTTP, files.
"""

import asyncio
import contextlib
import inspect
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI, HTTPException
from redis.asyncio import Redis
from safetensors.torch import load_file

from services.evaluator import worker
from services.evaluator.app import create_app, workers
from services.evaluator.asked import RequestStore
from services.evaluator.config import EvaluatorConfig, RunnerConfig
from services.evaluator.samples import read_samples
from services.trainer.shard_writer import ShardWriter
from services.trainer.versions import VersionStore
from shared import topology
from shared.environment import ENVIRONMENT_EVENT
from shared.errors import HttpFailed
from shared.http import HttpClient
from shared.job import JOB_FILE, Job
from shared.messages import EvalRequested, Event, JobAnnounced, Outcome, Score, Unparseable
from shared.process import free_port
from shared.redis import create_redis
from shared.registry import LEASE_S, Replica, register, unregister
from shared.streams import Consumer, announce, backlog, publish, read_from
from shared.tasks import end
from shared.telemetry import counter, now_s
from shared.weights.manifest import MANIFEST_FILE, Manifest, shard_file
from shared.weights.stored import StoredVersion
from tests.integration.own_broker import running_broker
from tests.served import served

JOB_ID = "demo-1f3a"
NUM_PROBLEMS = 12
NUM_SAMPLES = 4 * NUM_PROBLEMS
MIDWAY = 18  # samples: the fifth problem has two of its four


@dataclass
class FakeRollout:
    """Serves `policy_version`; `hiccups` requests get a 503 first, `gate` holds all back.

    After `num_allowed` answers it is away.
    """

    policy_version: int = 3
    hiccups: int = 0
    spans_of: int | None = None
    num_waiting: int = 0
    num_allowed: int = 1000
    requests: list[dict[str, Any]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/generate")
        async def generate(body: dict[str, Any]) -> dict[str, Any]:
            self.num_waiting += 1
            await self.gate.wait()
            self.num_waiting -= 1
            if len(self.requests) >= self.num_allowed:
                raise HTTPException(503, "away")
            if self.hiccups:
                self.hiccups -= 1
                raise HTTPException(503, "restarting")
            if body["policy_version"] != self.policy_version:
                raise HTTPException(409, f"version {self.policy_version} is served")
            self.requests.append(body)
            return {"policy_version": self.policy_version, "results": [self._completions(body)]}

        return app

    def _completions(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        (prompt,), seed = body["prompts"], body["seed"]
        num_tokens = 1 + seed % 5
        version = self.spans_of or self.policy_version
        return [
            {
                "token_ids": [5] * num_tokens,
                "logprobs": [0.0] * num_tokens,
                "text": f"{len(prompt['token_ids'])}" if seed % 3 else "0",
                "finish_reason": "stop" if seed % 4 else "length",
                "version_spans": [{"policy_version": version, "num_tokens": num_tokens}],
            }
        ]


@dataclass
class FakeReward:
    num_graded: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/grade")
        async def grade(body: dict[str, Any]) -> dict[str, Any]:
            self.num_graded += len(body["items"])
            return {"outcomes": [_graded(item).model_dump() for item in body["items"]]}

        return app


def _graded(item: dict[str, Any]) -> Outcome:
    if item["response"] == "0":
        return Unparseable(reason="no answer")
    return Score(value=float(item["response"] == item["gold"]), extracted=item["response"])


@dataclass
class Stage:
    """Everything around the evaluator under test."""

    redis: Redis
    redis_url: str
    tmp_path: Path
    rollout: FakeRollout
    reward: FakeReward
    rollout_url: str
    reward_url: str
    records: dict[str, Replica] = field(default_factory=dict)

    async def register(self) -> None:
        """Put both servers into the registry; `renew` keeps them there."""
        rollout = Replica(
            service="rollout",
            name="rollout-1",
            url=self.rollout_url,
            pid=1,
            job_id=JOB_ID,
            state="serving",
            policy_version=self.rollout.policy_version,
        )
        reward = Replica(service="reward", name="reward-0", url=self.reward_url, pid=1)
        self.records = {"rollout": rollout, "reward": reward}
        for record in self.records.values():
            await register(self.redis, record)

    async def renew(self) -> None:
        while True:
            for record in list(self.records.values()):
                await register(self.redis, record)
            await asyncio.sleep(LEASE_S / 4)

    async def announce_job(self) -> Job:
        suite = self.tmp_path / "suite.jsonl"
        problems = ["1" * (1 + row) for row in range(NUM_PROBLEMS)] + ["x" * 60]
        rows = [json.dumps({"problem": one, "answer": str(len(one))}) for one in problems]
        suite.write_text("\n".join(rows) + "\n")
        job = Job.model_validate(
            {
                "name": "demo",
                "steps": 1,
                "model": {"rollout_checkpoint": "assets/tiny-dsv4"},
                "data": {"path": str(suite)},
                "sampling": {"context_length": 40, "max_response_tokens": 8},
                "rollout": {"max_running_requests": 8},
                "eval": {
                    "suite": "lengths",
                    "data": {"path": str(suite)},
                    "max_response_tokens": 8,
                    "samples_per_problem": 4,
                    "grader": "arithmetic",
                },
            }
        )
        body = JobAnnounced(
            job_id=JOB_ID,
            state="active",
            trainer_url="http://127.0.0.1:1",
            job=job.model_dump(mode="json"),
        ).pack()
        await announce(
            self.redis, topology.JOB_CHANGES, body, current_key=topology.JOB_CURRENT, keep=10
        )
        return job

    async def ask(self, *, policy_version: int = 3, within_s: float = 120.0) -> None:
        holds: Any = self.redis.hset(topology.holds(JOB_ID), "rollout-1", str(policy_version))
        await holds
        request = EvalRequested(
            job_id=JOB_ID,
            eval_id=f"{JOB_ID}.e{policy_version:08d}",
            policy_version=policy_version,
            step=policy_version,
            deadline_s=now_s() + within_s,
        )
        await publish(self.redis, topology.evals(JOB_ID), request.pack())

    async def next_event(self, *, within_s: float = 60.0) -> Event:
        """The first event of an evaluation."""
        stream, last_id = topology.events(JOB_ID), b"0"
        async with asyncio.timeout(within_s):
            while True:
                for entry_id, body in await read_from(self.redis, stream, last_id, block_s=0.5):
                    last_id, event = entry_id, Event.unpack(body)
                    if event.name != ENVIRONMENT_EVENT:
                        return event

    async def nothing_asked(self) -> bool:
        return await backlog(self.redis, topology.evals(JOB_ID), topology.EVALUATORS) == 0

    @contextlib.asynccontextmanager
    async def evaluator(self) -> AsyncIterator[EvaluatorConfig]:
        """The service's application and loops, in this process; stopped at the end."""
        config = EvaluatorConfig(
            replica="evaluator",
            redis_url=self.redis_url,
            runs_dir=self.tmp_path / "runs",
            port=free_port(),
            drain_s=4.0,
            runner=RunnerConfig(retry_s=0.05),
            data_roots=(self.tmp_path,),
        )
        app, stop = create_app(config), asyncio.Event()
        async with served(app, port=config.port):
            tasks = [asyncio.create_task(loop(stop)) for loop in workers(app, config)]
            try:
                yield config
            finally:
                stop.set()
                async with asyncio.timeout(60):
                    await asyncio.gather(*tasks)

    @contextlib.asynccontextmanager
    async def evaluator_process(self, port: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
        """The service as it is deployed; killed at the end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.evaluator", "--replica", "evaluator"),
            *("--redis-url", self.redis_url, "--port", str(port), "--runner.retry-s", "0.05"),
            *("--runs-dir", str(self.tmp_path / "runs")),
            *("--data-roots", json.dumps([str(self.tmp_path)])),
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def num_kept(self, kind: str, stem: str = "v00000003") -> int:
        """Samples drawn or judged in the file that a restart goes on from."""
        partial = next(self.samples_file.parent.glob(f"{stem}.partial.jsonl"), None)
        text = partial.read_text() if partial else ""
        return sum(f'"kind":"{kind}"' in line for line in text.split("\n")[:-1])

    @property
    def samples_file(self) -> Path:
        return self.tmp_path / "runs" / JOB_ID / "evals" / "v00000003.jsonl"


async def until(
    condition: Callable[[], Any], what: str, *, within_s: float = 60.0, every_s: float = 0.02
) -> None:
    """Wait for a condition, which may be a coroutine function."""
    ends_s = time.monotonic() + within_s
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < ends_s, f"waited {within_s} s for {what}"
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def staged(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    rollout, reward = FakeRollout(), FakeReward()
    rollout.gate.set()
    async with (
        served(rollout.app()) as rollout_url,
        served(reward.app()) as reward_url,
    ):
        stage = Stage(redis, redis_url, tmp_path, rollout, reward, rollout_url, reward_url)
        renewing = asyncio.create_task(stage.renew())
        yield stage
        await end(renewing)


@pytest_asyncio.fixture
async def stage(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(redis, redis_url, tmp_path) as stage:
        yield stage


async def test_evaluation_is_published_acked_and_kept(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    async with stage.evaluator():
        await stage.ask()
        event = await stage.next_event()
    assert event.name == "eval_finished"
    fields = event.fields
    assert fields["eval_id"] == f"{JOB_ID}.e00000003"
    assert (fields["num_problems"], fields["skipped_problems"]) == (NUM_PROBLEMS, 1)
    assert fields["num_samples"] == NUM_SAMPLES
    assert set(fields["pass_at_k"]) == {"1", "2", "3", "4"}
    header, results = read_samples(stage.samples_file)
    assert header.policy_version == 3
    assert [one.num_correct for one in results] == fields["per_problem_correct"]
    assert sum(fields["per_problem_correct"]) / fields["num_samples"] == pytest.approx(
        fields["pass_at_k"]["1"]
    )
    assert fields["outcomes"]["score"] + fields["outcomes"]["unparseable"] == NUM_SAMPLES
    cut = sum(s.finish_reason == "length" for one in results for s in one.samples)
    assert fields["truncated_share"] == pytest.approx(cut / NUM_SAMPLES)
    assert 0 < cut < NUM_SAMPLES
    assert json.loads(stage.samples_file.with_suffix(".json").read_text()) == fields
    assert await stage.nothing_asked()


async def test_every_sample_is_asked_for_once_at_the_pinned_version(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    async with stage.evaluator():
        await stage.ask()
        await stage.next_event()
    asked = stage.rollout.requests
    assert len(asked) == NUM_SAMPLES
    assert {body["policy_version"] for body in asked} == {3}
    assert len({body["seed"] for body in asked}) == NUM_SAMPLES
    assert {body["num_samples"] for body in asked} == {1}


async def test_restarting_server_is_waited_for(stage: Stage) -> None:
    stage.rollout.hiccups = 5
    await stage.announce_job()
    await stage.register()
    async with stage.evaluator():
        await stage.ask()
        event = await stage.next_event()
    assert event.name == "eval_finished"
    assert len(stage.rollout.requests) == NUM_SAMPLES


async def test_server_at_another_version_is_not_used_until_it_has_the_right_one(
    stage: Stage,
) -> None:
    stage.rollout.policy_version = 2
    await stage.announce_job()
    await stage.register()
    async with stage.evaluator():
        await stage.ask()
        retries = counter("eval_retries_total", "Requests of evaluations that were repeated.")
        before = retries._value.get()
        await until(lambda: retries._value.get() > before + 3, "a few vain attempts")
        assert stage.rollout.requests == []
        stage.rollout.policy_version = 3
        await stage.register()
        event = await stage.next_event()
    assert event.fields["policy_version"] == 3


async def test_samples_of_other_weights_fail_the_evaluation_at_its_deadline(stage: Stage) -> None:
    stage.rollout.spans_of = 2
    await stage.announce_job()
    await stage.register()
    async with stage.evaluator():
        await stage.ask(within_s=3.0)
        event = await stage.next_event()
    assert event.name == "eval_failed"
    assert "version 3 to sample row" in event.fields["error"]
    assert "another version" in event.fields["error"]
    assert not stage.samples_file.exists()


async def test_missing_reward_server_is_named_at_the_deadline(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    del stage.records["reward"]
    await unregister(stage.redis, "reward", "reward-0")
    async with stage.evaluator():
        await stage.ask(within_s=3.0)
        event = await stage.next_event()
    assert event.name == "eval_failed"
    assert "a reward server to grade row" in event.fields["error"]
    assert await stage.nothing_asked()


async def test_killed_evaluators_work_is_taken_up_without_repeating_a_sample(
    stage: Stage,
) -> None:
    """Killed with a problem half done: the rest of it is drawn, at the same version."""
    await stage.announce_job()
    await stage.register()
    stage.rollout.num_allowed = MIDWAY
    await stage.ask()
    async with stage.evaluator_process() as process:
        await until(lambda: stage.num_kept("judged") == MIDWAY, "half of it", within_s=30)
        process.kill()
    stage.rollout.num_allowed = 1000
    async with stage.evaluator_process() as process:
        event = await stage.next_event(within_s=30)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert event.name == "eval_finished"
    asked = stage.rollout.requests
    assert len(asked) == len({body["seed"] for body in asked}) == NUM_SAMPLES
    assert {body["policy_version"] for body in asked} == {3}
    assert stage.reward.num_graded == NUM_SAMPLES
    _, results = read_samples(stage.samples_file)
    assert [(one.row, len(one.samples)) for one in results] == [
        (row, 4) for row in range(NUM_PROBLEMS)
    ]
    drawn = sorted(len(sample.token_ids) for one in results for sample in one.samples)
    assert drawn == sorted(1 + body["seed"] % 5 for body in asked)  # those that were asked for


async def test_samples_that_wait_for_a_grader_outlive_the_evaluator(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    reward = stage.records.pop("reward")
    await unregister(stage.redis, "reward", "reward-0")
    await stage.ask()
    async with stage.evaluator_process() as process:
        at_a_time = 8  # the job's max_running_requests
        await until(lambda: stage.num_kept("drawn") == at_a_time, "drawn samples", within_s=30)
        process.kill()
    assert stage.num_kept("judged") == 0
    stage.records["reward"] = reward
    await register(stage.redis, reward)
    async with stage.evaluator_process():
        event = await stage.next_event(within_s=30)
    assert event.name == "eval_finished"
    seeds = [body["seed"] for body in stage.rollout.requests]
    assert len(seeds) == len(set(seeds)) == NUM_SAMPLES


async def test_a_restart_at_another_version_draws_every_sample_anew(stage: Stage) -> None:
    """The server moved on meanwhile: what version 3 has left has no part in version 4."""
    await stage.announce_job()
    await stage.register()
    stage.rollout.num_allowed = MIDWAY
    await stage.ask()
    async with stage.evaluator_process() as process:
        await until(lambda: stage.num_kept("judged") == MIDWAY, "half of it", within_s=30)
        process.kill()
    stage.rollout.num_allowed, stage.rollout.policy_version = 1000, 4
    await stage.register()
    # The file of version 3 lies where version 4 would have its own.
    partial = stage.samples_file.with_suffix(".partial.jsonl")
    partial.rename(partial.with_name("v00000004.partial.jsonl"))
    await stage.redis.delete(topology.evals(JOB_ID))
    await stage.ask(policy_version=4)
    async with stage.evaluator_process():
        event = await stage.next_event(within_s=30)
    assert (event.name, event.fields["policy_version"]) == ("eval_finished", 4)
    asked = [body["policy_version"] for body in stage.rollout.requests]
    assert asked == [3] * MIDWAY + [4] * NUM_SAMPLES


async def test_stopped_evaluator_hands_its_work_back(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    stage.rollout.gate.clear()
    async with stage.evaluator():
        await stage.ask()
        await until(lambda: stage.rollout.num_waiting, "a request")
    stage.rollout.gate.set()
    async with stage.evaluator():
        event = await stage.next_event()
    assert event.name == "eval_finished"


async def test_what_is_taken_up_after_its_deadline_is_the_trainers_to_tell(stage: Stage) -> None:
    """Which has given it up by then, or asked again: the first event is of the second request."""
    await stage.announce_job()
    await stage.register()
    await stage.ask(within_s=-1.0)
    await stage.ask()
    async with stage.evaluator():
        event = await stage.next_event()
    assert event.name == "eval_finished"
    assert await stage.nothing_asked()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_broker_without_its_last_writes_gets_the_result_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """It comes back as it was in the middle of the evaluation: result and acknowledgement are gone,
    the request is read by somebody who has finished it, or who is killed as the broker is."""
    monkeypatch.setattr(worker, "Consumer", partial(Consumer, lease_s=2.0))
    async with running_broker(tmp_path / "broker", free_port()) as own:
        redis = create_redis(own.url, process="test", patience_s=20)
        async with staged(redis, own.url, tmp_path) as stage:
            await stage.announce_job()
            await stage.register()
            stage.rollout.gate.clear()
            await stage.ask()
            async with contextlib.AsyncExitStack() as stack:
                if is_killed:
                    process = await stack.enter_async_context(stage.evaluator_process())
                else:
                    await stack.enter_async_context(stage.evaluator())
                await until(lambda: stage.rollout.num_waiting, "a request", within_s=30)
                own.remember()
                stage.rollout.gate.set()
                assert (await stage.next_event()).name == "eval_finished"
                if is_killed:
                    process.kill()
                    await own.forget()
                    await stack.enter_async_context(stage.evaluator_process())
                else:
                    await until(stage.nothing_asked, "the acknowledgement")
                    await own.forget()
                assert (await stage.next_event(within_s=30)).name == "eval_finished"
            assert len(stage.rollout.requests) == NUM_SAMPLES
        await redis.aclose()


async def test_unusable_message_is_buried_and_the_next_one_served(stage: Stage) -> None:
    await stage.announce_job()
    await stage.register()
    await publish(stage.redis, topology.evals(JOB_ID), b"\xff\xff")
    async with stage.evaluator():
        await stage.ask()
        event = await stage.next_event()
    assert event.name == "eval_finished"
    assert await stage.redis.xlen(topology.dead(topology.evals(JOB_ID))) == 1


async def ended(http: HttpClient, url: str, *, within_s: float = 60.0) -> dict[str, Any]:
    """The evaluation's status once it has ended."""
    status: dict[str, Any] = {}

    async def is_over() -> bool:
        status.update(await http.get(url))
        return status["state"] in ("finished", "failed")

    await until(is_over, "the evaluation's end", every_s=0.05, within_s=within_s)
    return status


async def test_requested_evaluation_runs_and_is_remembered(stage: Stage) -> None:
    job = await stage.announce_job()
    await stage.register()
    assert job.eval is not None
    body = {
        "suite": "on-request",
        "data": {"path": job.eval.data.path},
        "samples_per_problem": 2,
        "max_response_tokens": 8,
        "grader": "arithmetic",
    }
    async with stage.evaluator() as running, HttpClient() as http:
        url = f"{running.url}/v1/evals"
        accepted = await http.post(url, body)
        assert (accepted["policy_version"], accepted["problems"]) == (3, NUM_PROBLEMS)
        status = await ended(http, f"{url}/{accepted['eval_id']}")
        assert status["state"] == "finished", status["error"]
        assert status["problems_done"] == NUM_PROBLEMS
        assert status["result"]["num_samples"] == 2 * NUM_PROBLEMS
        assert [one["eval_id"] for one in (await http.get(url))["evals"]] == [accepted["eval_id"]]


async def test_requested_evaluations_survive_a_killed_evaluator(stage: Stage) -> None:
    """One in progress, one behind it; after kill -9 both end, and no sample is drawn twice."""
    job = await stage.announce_job()
    await stage.register()
    assert job.eval is not None
    stage.rollout.num_allowed = 11  # five problems and a half
    data, port = {"path": job.eval.data.path}, free_port()
    bodies = [
        {"suite": name, "data": data, "samples_per_problem": 2, "max_response_tokens": 8}
        for name in ("first", "second")
    ]
    url = f"http://127.0.0.1:{port}/v1/evals"
    async with HttpClient(attempts=20) as http:  # connects once the process is up
        async with stage.evaluator_process(port) as process:
            accepted = [await http.post(url, body) for body in bodies]
            await until(lambda: stage.num_kept("judged", "x*") == 11, "eleven", within_s=30)
            process.kill()
            await process.wait()
        stage.rollout.num_allowed = 1000
        async with stage.evaluator_process(port) as process:
            ends = [await ended(http, f"{url}/{one['eval_id']}", within_s=30) for one in accepted]
            process.kill()
            await process.wait()
        async with stage.evaluator_process(port) as process:
            again = (await http.get(url))["evals"]
    assert [(one["state"], one["error"]) for one in ends] == [("finished", "")] * 2
    assert len(stage.rollout.requests) == 2 * 2 * NUM_PROBLEMS
    assert again == ends


async def test_request_that_kills_the_evaluator_is_given_up(stage: Stage) -> None:
    job = await stage.announce_job()
    await stage.register()
    assert job.eval is not None
    stage.rollout.gate.clear()
    body = {"suite": "x", "data": {"path": job.eval.data.path}, "max_response_tokens": 8}
    async with stage.evaluator() as running, HttpClient() as http:
        accepted = await http.post(f"{running.url}/v1/evals", body)
    store = RequestStore(stage.tmp_path / "runs", "evaluator")
    asked = store.get(accepted["eval_id"])
    assert asked is not None
    assert (asked.status.state, asked.attempts) == ("queued", 0)  # a stop hands it back
    store.keep(asked.model_copy(update={"attempts": 3}))
    store.scratch(asked.status.eval_id).mkdir()
    async with stage.evaluator() as running, HttpClient() as http:
        status = await ended(http, f"{running.url}/v1/evals/{accepted['eval_id']}")
    assert status["error"] == "the evaluator ended 3 times while it was at it"
    assert not store.scratch(asked.status.eval_id).exists()


async def test_requested_evaluation_fails_when_its_server_moves_on(stage: Stage) -> None:
    job = await stage.announce_job()
    await stage.register()
    assert job.eval is not None
    stage.rollout.gate.clear()
    body = {"suite": "x", "data": {"path": job.eval.data.path}, "max_response_tokens": 8}
    async with stage.evaluator() as running, HttpClient() as http:
        url = f"{running.url}/v1/evals"
        accepted = await http.post(url, body)
        stage.rollout.policy_version = 4
        await stage.register()
        stage.rollout.gate.set()
        status = await ended(http, f"{url}/{accepted['eval_id']}")
    assert status["state"] == "failed"
    assert "serves version 4" in status["error"]


async def test_bare_checkpoint_is_evaluated_and_the_same_request_repeats_nothing(
    stage: Stage,
) -> None:
    """With a real sampler of its own and no job at all."""
    await stage.register()
    suite = stage.tmp_path / "sums.jsonl"
    rows = [{"problem": f"1{i}+2{i}=", "answer": str(30 + 2 * i)} for i in range(3)]
    suite.write_text("\n".join(map(json.dumps, rows)) + "\n")
    body = {
        "suite": "sums",
        "data": {"path": str(suite)},
        "samples_per_problem": 2,
        "max_response_tokens": 24,
        "budgets": [8],
        "grader": "arithmetic",
        "checkpoint": "assets/tiny-dsv4",
        "deadline_s": 50.0,
    }
    async with stage.evaluator() as running, HttpClient() as http:
        url = f"{running.url}/v1/evals"
        accepted = await http.post(url, body)
        status = await ended(http, f"{url}/{accepted['eval_id']}", within_s=50)
        assert status["state"] == "finished", status["error"]
        assert [one["budget"] for one in status["result"]["budgets"]] == [8, 24]
        num_graded = stage.reward.num_graded
        again = await http.post(url, body)
        repeated = await ended(http, f"{url}/{again['eval_id']}", within_s=50)
        assert repeated["result"]["per_problem_correct"] == status["result"]["per_problem_correct"]
        assert (again["eval_id"], stage.reward.num_graded) == (accepted["eval_id"], num_graded)
    samples = stage.tmp_path / "runs" / "offline" / "evals"
    header, results = read_samples(next(samples.glob("c*.sums.jsonl")))
    assert (header.budgets, len(results)) == ([8], 3)
    assert stage.rollout.requests == []


async def test_a_version_that_is_kept_as_changes_is_evaluated_and_its_run_left_alone(
    stage: Stage,
) -> None:
    job = await stage.announce_job()
    assert job.eval is not None
    await stage.register()
    run = stage.tmp_path / "runs" / JOB_ID
    store = published(run, versions=3)
    (run / JOB_FILE).write_text(job.model_dump_json())
    assert [store.is_whole(version) for version in (0, 1, 2)] == [True, False, True]
    before = sorted(path for path in run.rglob("*"))
    body = {
        "suite": "lengths",
        "data": {"path": job.eval.data.path},
        "samples_per_problem": 1,
        "max_response_tokens": 8,
        "grader": "arithmetic",
        "context_length": 40,
        "deadline_s": 50.0,
        "checkpoint": str(store.path(1)),
    }
    async with stage.evaluator() as running, HttpClient() as http:
        url = f"{running.url}/v1/evals"
        accepted = await http.post(url, body)
        status = await ended(http, f"{url}/{accepted['eval_id']}", within_s=50)
        assert status["state"] == "finished", status["error"]
        assert status["result"]["policy_version"] == 1
        store.restore(1)  # another moment's whole version is the same checkpoint
        again = await http.post(url, body)
        assert again["eval_id"] == accepted["eval_id"]
        await ended(http, f"{url}/{accepted['eval_id']}", within_s=50)
        VersionStore(run).tidy({2}, keep_last=9, keep_bytes=2**40)
        (store.path(0) / shard_file(0)).unlink()
        words = r"v00000000/shard-00000.bin is missing; whole versions: 2"
        with pytest.raises(HttpFailed, match=words) as refused:
            await http.post(url, body)
        assert refused.value.status == 422
    left = {path for path in run.rglob("*") if path.relative_to(run).parts[0] != "evals"}
    assert left == set(before) - {store.path(0) / shard_file(0)}
    assert not list((stage.tmp_path / "runs" / "_evals").rglob("*.rebuilt"))


def published(run: Path, *, versions: int) -> VersionStore:
    """Versions of the tiny release as a run keeps them, the same but for one tensor."""
    store, tensors = VersionStore(run), load_file("assets/tiny-dsv4/model.safetensors")
    for version in range(versions):
        tensors["norm.weight"] = tensors["norm.weight"] * 1.5
        base, path = store.newest_whole(), store.fresh_path(version)
        against = None if base is None else StoredVersion.open(store.path(base))
        with ShardWriter(path, 2**24, base=against) as writer:
            writer.add(tensors)
        manifest = Manifest(
            job_id=JOB_ID,
            policy_version=version,
            shards=writer.shards,
            tensors=writer.tensors,
            delta=writer.delta(),
        )
        (path / MANIFEST_FILE).write_text(manifest.model_dump_json())
        store.tidy({version}, keep_last=9, keep_bytes=2**40)
    return store


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": "tests"}, "neither config.json nor manifest.json"),
        ({"checkpoint": "/etc"}, "outside the data roots"),
        ({"checkpoint": "assets/tiny-dsv4", "replica": "rollout-1"}, "not both"),
        (
            {"checkpoint": "assets/tiny-dsv4", "data": {"prompt_format": "thinking"}},
            "has no token",
        ),
    ],
)
async def test_checkpoint_that_cannot_be_evaluated_is_refused(
    stage: Stage, change: dict[str, Any], words: str
) -> None:
    job = await stage.announce_job()
    assert job.eval is not None
    data = {"path": job.eval.data.path, **change.pop("data", {})}
    body = {"suite": "x", "data": data, "max_response_tokens": 8, **change}
    async with stage.evaluator() as running, HttpClient() as http:
        with pytest.raises(Exception, match=words):
            await http.post(f"{running.url}/v1/evals", body)


async def test_torch_dist_checkpoint_is_refused_with_the_command_that_converts_it(
    stage: Stage,
) -> None:
    job = await stage.announce_job()
    assert job.eval is not None
    folder = stage.tmp_path / "step-40"
    folder.mkdir()
    (folder / ".metadata").touch()
    body = {"suite": "x", "data": {"path": job.eval.data.path}, "max_response_tokens": 8}
    words = f"tandem convert {folder} {folder}-fp8 --to fp8 --like RELEASE"
    async with stage.evaluator() as running, HttpClient() as http:
        with pytest.raises(Exception, match=re.escape(words)):
            await http.post(f"{running.url}/v1/evals", {**body, "checkpoint": str(folder)})


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"data": {"path": "/etc/passwd"}}, 422, "outside the data roots"),
        ({"data": {"path": "missing.jsonl"}}, 422, "no such file"),
        ({"replica": "rollout-9"}, 422, "rollout-9 serves no version; serving: rollout-1"),
        (
            {"max_response_tokens": 40},
            422,
            "all 13 prompts of x are too long: the shortest has 1 tokens, and context_length 40 - "
            "max_response_tokens 40 leaves 0 for a prompt",
        ),
        ({"samples": 3}, 422, "samples"),
    ],
)
async def test_wrong_request_is_refused_with_its_key(
    stage: Stage, change: dict[str, Any], status: int, words: str
) -> None:
    job = await stage.announce_job()
    await stage.register()
    assert job.eval is not None
    body = {"suite": "x", "data": {"path": job.eval.data.path}, "max_response_tokens": 8, **change}
    async with stage.evaluator() as running, HttpClient() as http:
        with pytest.raises(Exception, match=words) as caught:
            await http.post(f"{running.url}/v1/evals", body)
    assert getattr(caught.value, "status", None) == status
