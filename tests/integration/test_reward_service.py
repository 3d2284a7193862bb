"""The reward service as a process: groups in, scored groups out, whatever dies in between."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from services.cli.regrade import ask, differences, read_run, with_changes
from services.reward.pool.settings import PoolConfig
from services.trainer.recording import RECORDING_FILE, Recording
from shared import topology
from shared.job import Job
from shared.messages import (
    Event,
    JobAnnounced,
    PromptGroup,
    Rollout,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    VersionSpan,
)
from shared.process import die_with_parent, free_port, prepare_to_fork
from shared.registry import live_replicas
from shared.streams import announce, backlog, dead_letters, publish, read_from

ROOT = Path(__file__).parents[2]
JOB_ID = "graded-0001"
HOSTILE = ROOT / "tests" / "fixtures" / "graders"


class Service:
    def __init__(self, process: "subprocess.Popen[bytes]", url: str, name: str) -> None:
        self.process = process
        self.url = url
        self.name = name

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.get(self.url + path)

    async def grade(self, body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(self.url + "/v1/grade", json=body)

    async def ready(self) -> "Service":
        async def is_ready() -> bool:
            assert self.process.poll() is None, "the service ended"
            with contextlib.suppress(httpx.TransportError):
                return (await self.get("/readyz")).status_code == 200
            return False

        await until(is_ready)
        return self

    async def stopped(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 60)


@contextlib.contextmanager
def starting(redis_url: str) -> Iterator[Callable[..., Service]]:
    """Start replicas; all are ended on leaving."""
    running: list[Service] = []

    def start_one(name: str, *flags: str) -> Service:
        port = free_port()
        prepare_to_fork()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.reward", "--port", str(port), "--replica", name,
             "--redis-url", redis_url, "--pool.workers", "1", *flags],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOSTILE)},
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        running.append(Service(process, f"http://127.0.0.1:{port}", name))
        return running[-1]

    yield start_one
    for service in running:
        service.process.kill()
        service.process.wait()


@pytest.fixture
def start(redis_url: str) -> Iterator[Callable[..., Service]]:
    with starting(redis_url) as start_one:
        yield start_one


async def until(holds: Callable[[], Awaitable[Any]], within_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (value := await holds()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        await asyncio.sleep(0.05)
    return value


def job(grader: str = "arithmetic", timeout_s: float = 30.0) -> Job:
    return Job.model_validate(
        {
            "name": "graded",
            "steps": 1,
            "model": {"rollout_checkpoint": "nowhere"},
            "data": {"path": "nowhere.jsonl"},
            "sampling": {"context_length": 64, "max_response_tokens": 16},
            "reward": {"grader": grader, "timeout_s": timeout_s},
        }
    )


async def announce_job(redis: Redis, state: str = "active", *, of: Job | None = None) -> None:
    body = JobAnnounced.model_validate(
        {"job_id": JOB_ID, "state": state, "trainer_url": "http://nowhere",
         "job": (of or job()).model_dump(mode="json")}
    ).pack()  # fmt: skip
    await announce(redis, topology.JOB_CHANGES, body, current_key=topology.JOB_CURRENT)


def group(
    draw: int,
    texts: list[str],
    *,
    gold: str = "85",
    grader: str = "arithmetic",
    lengths: Sequence[int] = (),
) -> RolloutGroup:
    """`lengths` are the responses' tokens, one each unless given."""
    group_id = f"{JOB_ID}.g{draw:06d}"
    prompt = PromptGroup(
        job_id=JOB_ID, group_id=group_id, draw=draw, prompt_token_ids=[1, 2, 3], gold=gold,
        grader=grader, num_samples=len(texts), sampling=SamplingParams(max_response_tokens=16),
        seed=0, min_policy_version=0,
    )  # fmt: skip
    rollouts = [
        Rollout(
            rollout_id=f"{group_id}.{i}", response_token_ids=[5] * num, logprobs=[-0.1] * num,
            text=text, version_spans=[VersionSpan(policy_version=0, num_tokens=num)],
            finish_reason="stop",
        )
        for i, (text, num) in enumerate(zip(texts, lengths or [1] * len(texts), strict=True))
    ]  # fmt: skip
    return RolloutGroup(
        prompt=prompt, replica="rollout-0", rollouts=rollouts, sampled_at_s=0.0, sampling_s=0.1
    )


async def scored(redis: Redis) -> dict[str, list[ScoredGroup]]:
    found: dict[str, list[ScoredGroup]] = {}
    for _, body in await read_from(redis, topology.groups(JOB_ID), b"0", limit=10_000):
        one = ScoredGroup.unpack(body)
        found.setdefault(one.group.prompt.group_id, []).append(one)
    return found


async def events(redis: Redis, name: str) -> list[Event]:
    news = await read_from(redis, topology.events(JOB_ID), b"0")
    return [event for event in (Event.unpack(body) for _, body in news) if event.name == name]


async def follows(redis: Redis, job_id: str | None) -> bool:
    replicas = await live_replicas(redis, "reward")
    return bool(replicas) and replicas[0].job_id == job_id


async def num_waiting(redis: Redis) -> int:
    return await backlog(redis, topology.rollouts(JOB_ID), topology.GRADERS)


async def test_a_regrade_of_a_run_gives_its_recorded_rewards(
    redis: Redis, start: Callable[..., Service], tmp_path: Path
) -> None:
    """Weighted parts and the penalty for length as well; another grader shows differences."""
    reward = {
        "grader": "gsm8k",
        "parts": [{"grader": "format", "weight": 0.3}, {"grader": "math", "weight": 0.1}],
        "overlong": {"max_tokens": 16, "buffer_tokens": 9, "weight": 0.7},
    }
    recorded_job = Job.model_validate(job().model_dump() | {"reward": reward})
    service = await start("reward-0").ready()
    await announce_job(redis, of=recorded_job)
    await until(lambda: follows(redis, JOB_ID))
    texts = ["Answer: 85", "The answer is 85.", r"\boxed{84}", "no idea", r"\boxed{\frac{170}{2}}"]
    for draw in range(2):
        lengths = [1 + 3 * i + draw for i in range(len(texts))]
        sent = group(draw, texts, grader="gsm8k", lengths=lengths)
        await publish(redis, topology.rollouts(JOB_ID), sent.pack())
    found = await until(lambda: all_scored(redis, 2))
    recording = Recording(tmp_path / RECORDING_FILE)
    for scores in found.values():
        recording.keep_group(scores[0])
    recording.close()
    (tmp_path / "job.json").write_text(recorded_job.model_dump_json())

    recorded = list(read_run(tmp_path))
    again = await ask(service.url, recorded)
    assert again == [one.before for one in recorded]
    values = {outcome.value for outcome in again if outcome.kind == "score"}
    assert len(values) >= 4, "parts and lengths tell them apart"
    other = [with_changes(one, grader="math", timeout_s=None) for one in recorded]
    differing = differences(recorded, await ask(service.url, other))
    assert {one.recorded.response for one in differing} == {texts[-1]}
    assert await service.stopped() == 0


async def all_scored(redis: Redis, number: int) -> dict[str, list[ScoredGroup]]:
    found = await scored(redis)
    return found if len(found) == number else {}


async def test_groups_are_graded_announced_and_acked(
    redis: Redis, start: Callable[..., Service]
) -> None:
    service = await start("reward-0").ready()
    await announce_job(redis)
    sent = group(7, ["7+8=15;85", "1;84", "nothing", "85"])
    await publish(redis, topology.rollouts(JOB_ID), sent.pack())
    found = await until(partial(scored, redis))
    (answer,) = found[sent.prompt.group_id]
    assert [outcome.kind for outcome in answer.outcomes] == [
        "score",
        "score",
        "unparseable",
        "score",
    ]
    assert [getattr(outcome, "value", None) for outcome in answer.outcomes] == [1.0, 0.0, None, 1.0]
    assert answer.group.pack() == sent.pack()

    (event,) = await until(partial(events, redis, "group_graded"))
    assert event.fields["group_id"] == sent.prompt.group_id
    assert event.fields["reward_mean"] == pytest.approx(2 / 3)
    assert event.fields["outcomes"] == {"score": 3, "unparseable": 1}

    async def nothing_waits() -> bool:
        return await num_waiting(redis) == 0

    await until(nothing_waits)
    await until(partial(follows, redis, JOB_ID))
    (replica,) = await live_replicas(redis, "reward")
    assert (replica.name, replica.url) == ("reward-0", service.url)
    metrics = (await service.get("/metrics")).text
    assert 'reward_outcomes_total{kind="score"} 3.0' in metrics
    assert "reward_groups_total 1.0" in metrics


async def test_poison_is_buried_with_a_reason_and_others_go_on(
    redis: Redis, start: Callable[..., Service]
) -> None:
    await start("reward-0").ready()
    await announce_job(redis)
    stream = topology.rollouts(JOB_ID)
    wrong = group(1, ["85"]).model_dump()
    wrong["rollouts"][0]["logprobs"] = b""
    import msgpack

    poison = [b"\xff\x00 garbage", msgpack.packb([1, 2]), msgpack.packb(wrong), b""]
    for body in [*poison, group(2, ["85"], grader="nope").pack(), group(3, ["85"]).pack()]:
        await publish(redis, stream, body)
    await until(partial(scored, redis))

    async def all_buried() -> list[Any]:
        letters = await dead_letters(redis, stream)
        return letters if len(letters) == 5 else []

    reasons = sorted(letter.reason for letter in await until(all_buried))
    assert any("no grader 'nope'; there are" in reason for reason in reasons)
    assert any("0 logprobs for 1 response tokens" in reason for reason in reasons)
    assert list(await scored(redis)) == [f"{JOB_ID}.g000003"]


async def test_a_dead_replicas_groups_are_taken_over(
    redis: Redis, start: Callable[..., Service]
) -> None:
    plug_in = ("--pool.plug-ins", '{"sleeps": "hostile_graders:sleeps"}')
    first = await start("reward-0", *plug_in).ready()
    await announce_job(redis)
    stream = topology.rollouts(JOB_ID)
    for draw in range(30):
        await publish(redis, stream, group(draw, ["0.01"] * 4, grader="sleeps").pack())
    await until(partial(scored, redis))
    await first.stopped(signal.SIGKILL)
    assert len(await scored(redis)) < 30
    second = await start("reward-0", *plug_in).ready()  # as the supervisor does: same name

    async def all_there() -> bool:
        return len(await scored(redis)) == 30 and await num_waiting(redis) == 0

    await until(all_there)
    assert await second.stopped() == 0


async def test_sigterm_drains_and_leaves(redis: Redis, start: Callable[..., Service]) -> None:
    service = await start(
        "reward-0", "--pool.plug-ins", '{"sleeps": "hostile_graders:sleeps"}'
    ).ready()
    await announce_job(redis)
    await publish(redis, topology.rollouts(JOB_ID), group(1, ["1"], grader="sleeps").pack())

    async def is_taken() -> bool:
        groups = await redis.xinfo_groups(topology.rollouts(JOB_ID))
        return any(one["pending"] for one in groups)

    await until(is_taken)
    children = [int(pid) for pid in child_pids(service.process.pid)]
    assert children
    assert await service.stopped() == 0
    assert list(await scored(redis)) == [f"{JOB_ID}.g000001"]
    assert await num_waiting(redis) == 0
    assert await live_replicas(redis, "reward") == []
    assert not [pid for pid in children if is_alive(pid)]


async def test_a_killed_service_leaves_no_process(
    redis: Redis, start: Callable[..., Service]
) -> None:
    service = await start("reward-0").ready()
    (zygote,) = child_pids(service.process.pid)
    pids = [zygote, *child_pids(zygote)]
    assert len(pids) == 2 + PoolConfig().spare_workers
    await service.stopped(signal.SIGKILL)

    async def all_gone() -> bool:
        return not any(is_alive(pid) for pid in pids)

    await until(all_gone)


async def test_a_lost_zygote_ends_the_service(redis: Redis, start: Callable[..., Service]) -> None:
    service = await start("reward-0").ready()
    (zygote,) = child_pids(service.process.pid)
    os.kill(zygote, signal.SIGKILL)
    assert await asyncio.to_thread(service.process.wait, 60) == 1


async def test_another_job_is_followed(redis: Redis, start: Callable[..., Service]) -> None:
    service = await start("reward-0").ready()
    await announce_job(redis)

    await until(partial(follows, redis, JOB_ID))
    await announce_job(redis, "finished")
    await until(partial(follows, redis, None))
    assert (await service.get("/readyz")).status_code == 200


@pytest.fixture(scope="module")
def started_service(redis_url: str) -> Iterator[Service]:
    limits = {"max-items": 3000, "max-body-bytes": 2_000_000, "max-response-chars": 500_000}
    with starting(redis_url) as start_one:
        yield start_one("reward-1", *[f"--limits.{name}={limit}" for name, limit in limits.items()])


@pytest.fixture
async def service(started_service: Service) -> Service:
    return await started_service.ready()


async def test_one_and_many_are_graded_over_http(service: Service) -> None:
    one = {"response": "so \\boxed{073}", "gold": 73, "grader": "aime"}
    answer = (await service.grade(one)).json()
    assert [outcome["value"] for outcome in answer["outcomes"]] == [1.0]

    items = [
        {"response": f"\\boxed{{{i}}}", "gold": str(i % 2000), "grader": "math"}
        for i in range(3000)
    ]
    answer = (await service.grade({"items": items})).json()
    assert [outcome["value"] for outcome in answer["outcomes"]] == [1.0] * 2000 + [0.0] * 1000

    hostile = ["\\boxed{" + "{" * 100_000, "\\boxed{9^{9^{9}}}", "{" * 100_000, "\\boxed{NaN}"]
    items = [{"response": text, "gold": "7", "timeout_s": 30} for text in hostile]
    kinds = [o["kind"] for o in (await service.grade({"items": items})).json()["outcomes"]]
    assert kinds == ["unparseable", "score", "unparseable", "score"]


@pytest.mark.parametrize(
    ("body", "status", "key", "message"),
    [
        ({"items": [{"response": "1"}]}, 422, "items.0.gold", "Field required"),
        ({"items": [{"response": "1", "gold": True}]}, 422, "items.0.gold", "valid string"),
        ({"items": [{"response": "1", "gold": "1", "golf": 1}]}, 422, "items.0.golf", "Extra"),
        (
            {"response": "1", "gold": "1", "grader": "nope"},
            422,
            "items.0.grader",
            "no 'nope'; there are aime, arithmetic, code, dapo, format, gsm8k, math",
        ),
        ({"response": "1", "gold": "1", "timeout_s": 61}, 422, "items.0.timeout_s", "exceeds 60"),
        (
            {"response": "1", "gold": "1", "timeout_s": 0},
            422,
            "items.0.timeout_s",
            "greater than 0",
        ),
        ({"response": "1" * 500_001, "gold": "1"}, 422, "items.0.response", "exceed 500000"),
        ({"items": [{"response": "1", "gold": "1"}] * 3001}, 413, "items", "exceed 3000"),
        ({"response": "1" * 2_000_001, "gold": "1"}, 413, "body", "exceeds 2000000 bytes"),
    ],
)
async def test_requests_beyond_the_limits_name_key_and_bound(
    service: Service, body: Any, status: int, key: str, message: str
) -> None:
    answer = await service.grade(body)
    assert answer.status_code == status
    (detail,) = answer.json()["detail"]
    assert detail["key"] == key
    assert message in detail["message"]


async def test_malformed_bodies_are_answered_briefly(service: Service) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        is_json = {"content-type": "application/json"}
        broken = await client.post(service.url + "/v1/grade", content=b"{" * 1000, headers=is_json)
        chunked = await client.post(
            service.url + "/v1/grade", content=chunks(3_000_000), headers=is_json
        )
    assert broken.status_code == 422
    assert len(broken.content) < 300
    assert chunked.status_code == 413


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(0, size, 100_000):
        yield b" " * 100_000


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def child_pids(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
