"""Recordings: what a run kept trains again to the same weights; jobs that only sample or train."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from services.trainer.assembly import assemble
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.pausing import JobPaused
from services.trainer.recording import RECORDING_FILE, Recording, RecordingUnreadable
from services.trainer.replayer import Replayer
from services.trainer.steps import EndState
from shared.http import HttpClient
from shared.messages import Outcome, PromptGroup
from tests.integration.conductor_world import (
    JOB_ID,
    ConductorConfig,
    Crash,
    FakeRanks,
    World,
    alternating,
    make_job,
    make_source,
    run_to_end,
    running_world,
)
from tests.timed_fields import TIMED


class Replay:
    """Train-only jobs on what `run_dir` recorded."""

    def __init__(self, redis: Redis, run_dir: Path, recorded: Path, **sections: Any) -> None:
        self.history: list[tuple[int, list[str]]] = []
        self.faults: list[str] = []
        self.refuse_steps: set[int] = set()
        self.ranks: FakeRanks | None = None
        self.run_dir = run_dir
        run_dir.mkdir()
        given = {"mode": "train_only", "recording": str(recorded), "record": False}
        self.job = make_job(**(given | sections))
        self.redis = redis

    def replayer(self) -> Replayer:
        async def start() -> FakeRanks:
            self.ranks = FakeRanks(self.history, self.faults, self.refuse_steps)
            return self.ranks

        parts = assemble(
            self.redis,
            source=make_source(self.job),
            run_dir=self.run_dir,
            start_ranks=start,
            http=HttpClient(attempts=1),
            trainer_url="http://trainer",
            shards_url="http://trainer",
            replica="trainer-0",
            config=ConductorConfig(),
        )
        return Replayer(parts)

    async def run(self) -> FakeRanks:
        replayer = self.replayer()
        ended: EndState | None = None
        try:
            await replayer.run()
            ended = "finished"
        finally:
            await replayer.close(ended)
        assert self.ranks is not None
        return self.ranks


async def record(redis: Redis, run_dir: Path, **sections: Any) -> World:
    job = make_job(**({"record": True} | sections))
    async with running_world(redis, run_dir, job=job, servers=2) as world:
        await run_to_end(world, crash_at=world_crashes(sections))
        return world


def world_crashes(sections: dict[str, Any]) -> list[str]:
    return ["packed", "committed", "acked"] if "algorithm" in sections else []


@pytest.mark.parametrize("sections", [{}, {"algorithm": {"max_lag": 2}, "steps": 6}])
async def test_a_recording_trains_to_the_same_weights(
    redis: Redis, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Also one of a run in which the conductor died thrice."""
    world = await record(redis, tmp_path / "run", **sections)
    again = Replay(redis, tmp_path / "again", tmp_path / "run", **sections)
    ranks = await again.run()
    assert ranks.weights == world.ranks.weights
    assert again.history == sorted(dict(world.history).items())
    recorded, told = world.events("step"), events(again.run_dir, "step")
    for name in ("reward_raw", "reward_trained", "tokens", "lag_mean", "loss"):
        assert [one[name] for one in told] == [one[name] for one in recorded], name


async def test_a_recording_has_every_group_that_arrived(redis: Redis, tmp_path: Path) -> None:
    world = await record(redis, tmp_path / "run")
    books = Books(world.run_dir / BOOKS_FILE)
    recording = Recording.of_run(world.run_dir)
    trained = [name for step in recording.steps() for name in step.group_ids]
    assert trained == [group.group_id for n in range(1, 5) for group in books.groups_of_step(n)]
    dropped = [event["group_id"] for event in world.events("group_dropped")]
    assert set(recording.group_ids()) == {*trained, *dropped}
    first = next(recording.groups())
    assert first.group.rollouts[0].logprobs.dtype == np.float32
    recording.close()
    books.close()


async def test_a_replay_that_dies_goes_on_and_one_that_is_paused_resumes(
    redis: Redis, tmp_path: Path
) -> None:
    world = await record(redis, tmp_path / "run")
    again = Replay(redis, tmp_path / "again", tmp_path / "run")
    again.faults += ["train_step:2", "save:4"]
    paused = again.replayer()
    paused.pause_asked.set()
    with pytest.raises(JobPaused, match="paused on request"):
        await paused.run()
    await paused.close("paused", error="paused on request")
    assert (await again.run()).weights == world.ranks.weights


async def test_a_replay_whose_step_was_refused_cannot_take_its_groups_again(
    redis: Redis, tmp_path: Path
) -> None:
    await record(redis, tmp_path / "run")
    again = Replay(redis, tmp_path / "again", tmp_path / "run")
    again.refuse_steps.add(2)
    with pytest.raises(JobPaused, match="step 2 was refused"):
        await again.run()
    with pytest.raises(RecordingUnreadable, match="step 2: none of its groups can be trained"):
        await again.run()
    assert [step for step, _ in again.history] == [1, 1]  # replayed from its redo log


@pytest.mark.parametrize("moment", ["kept", "refused"])
async def test_a_step_whose_process_died_before_the_books_had_it_is_not_replayed(
    redis: Redis, tmp_path: Path, moment: str
) -> None:
    """Recorded and not yet committed, or undone in the books and not yet in the recording."""
    job = make_job(record=True)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.refuse_steps |= {3} if moment == "refused" else set()
        dying = world.conductor()
        books = dying.parts.books
        name = {"kept": "commit_batch", "refused": "refuse_step"}[moment]
        act = getattr(books, name)

        def die(step: int, **named: Any) -> None:
            if moment == "refused":
                act(step, **named)
            if step == 3:
                raise Crash(name)
            if moment == "kept":
                act(step, **named)

        setattr(books, name, die)
        with pytest.raises(Crash):
            await asyncio.wait_for(dying.run(), 60)
        await dying.close(None)
        assert recorded_steps(world.run_dir) == [1, 2, 3]
        trained = world.ranks.weights
        with pytest.raises(RecordingUnreadable, match="has 2 steps, the job asks for 3"):
            await Replay(redis, tmp_path / "long", world.run_dir, steps=3).run()
        again = Replay(redis, tmp_path / "again", world.run_dir, steps=2)
        assert (await again.run()).weights == trained
        following = world.conductor()
        await following._steps.restore()
        await following.close("paused")
        assert recorded_steps(world.run_dir) == [1, 2]


def recorded_steps(run_dir: Path) -> list[int]:
    with contextlib.closing(Recording.of_run(run_dir)) as recording:
        return [step.step for step in recording.steps()]


async def test_a_replay_of_too_little_says_so(redis: Redis, tmp_path: Path) -> None:
    await record(redis, tmp_path / "run")
    again = Replay(redis, tmp_path / "again", tmp_path / "run", steps=9)
    with pytest.raises(RecordingUnreadable, match="has 4 steps, the job asks for 9"):
        await again.run()
    again = Replay(redis, tmp_path / "third", tmp_path / "nowhere")
    with pytest.raises(RecordingUnreadable, match=f"has no {RECORDING_FILE}"):
        await again.run()


async def test_a_replay_of_what_is_no_recording_says_so(redis: Redis, tmp_path: Path) -> None:
    await record(redis, tmp_path / "run", steps=1)
    file = tmp_path / "run" / RECORDING_FILE
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE groups SET body = x'00ff'")
    with pytest.raises(RecordingUnreadable, match=r"test-0000\.g00000\d cannot be read: .*decompr"):
        await Replay(redis, tmp_path / "torn", tmp_path / "run", steps=1).run()
    file.write_bytes(b"garbage" * 1000)
    with pytest.raises(RecordingUnreadable, match=r"is no recording: file is not a database"):
        await Replay(redis, tmp_path / "again", tmp_path / "run", steps=1).run()


async def test_a_job_that_only_samples_keeps_groups_and_trains_nothing(
    redis: Redis, tmp_path: Path
) -> None:
    """What it recorded is trained by another job."""
    world = await record(redis, tmp_path / "run", mode="rollout_only")
    assert world.history == []
    assert [step["policy_version"] for step in world.events("step")] == [0, 0, 0, 0]
    assert {step["lag_max"] for step in world.events("step")} == {0}
    again = Replay(redis, tmp_path / "again", tmp_path / "run", algorithm={"max_lag": 8})
    await again.run()
    assert [len(groups) for _, groups in again.history] == [3, 3, 3, 3]
    assert [step["lag_max"] for step in events(again.run_dir, "step")] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_replay_keeps_the_bound_on_lag_of_what_was_only_sampled(
    redis: Redis, tmp_path: Path, max_lag: int
) -> None:
    """The samples stay at version 0 while the version that is trained rises."""
    await record(redis, tmp_path / "run", mode="rollout_only")
    again = Replay(redis, tmp_path / "again", tmp_path / "run", algorithm={"max_lag": max_lag})
    with pytest.raises(
        RecordingUnreadable,
        match=rf"step {max_lag + 2}: none .* \(3 too_old; version {max_lag + 1} is trained with "
        rf"algorithm.max_lag = {max_lag}\)",
    ):
        await again.run()
    assert [step["lag_max"] for step in events(again.run_dir, "step")] == [*range(max_lag + 1)]


def age_a_group(run_dir: Path, step: int) -> None:
    """Turn what the step's first group was sampled with into version 0."""
    recording = Recording.of_run(run_dir)
    scored = recording.group(recording.steps()[step - 1].group_ids[0])
    for rollout in scored.group.rollouts:
        for span in rollout.version_spans:
            object.__setattr__(span, "policy_version", 0)
    recording.keep_group(scored)
    recording.close()


async def test_a_replay_counts_the_groups_that_it_leaves_out(redis: Redis, tmp_path: Path) -> None:
    """Once, also when a rank died meanwhile."""
    world = await record(redis, tmp_path / "run")
    age_a_group(world.run_dir, 2)
    again = Replay(redis, tmp_path / "again", world.run_dir)
    again.faults += ["train_step:2"]
    await again.run()
    assert [len(names) for _, names in again.history[-3:]] == [2, 3, 3]
    books = Books(again.run_dir / BOOKS_FILE)
    assert books.counts() == {
        "open": 0, "trained": 11, "dropped": 1, "dropped:too_old": 1, "skipped": 0
    }  # fmt: skip
    books.close()
    (dropped,) = events(again.run_dir, "group_dropped")
    assert dropped["reason"] == "too_old"
    for name in ("graded_samples", "reward_raw"):
        recorded = [step[name] for step in world.events("step")]
        assert [step[name] for step in events(again.run_dir, "step")] == pytest.approx(recorded)


async def test_a_job_that_only_samples_goes_on_after_a_crash(redis: Redis, tmp_path: Path) -> None:
    job = make_job(mode="rollout_only", record=True)
    async with running_world(redis, tmp_path / "run", job=job) as world:
        await run_to_end(world, crash_at=["committed", "acked", "told"])
        recording = Recording.of_run(world.run_dir)
        names = Counter(name for step in recording.steps() for name in step.group_ids)
        assert len(names) == 12
        assert set(names.values()) == {1}
        recording.close()


# Deterministic jobs


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return World.events(_Folder(run_dir), name)  # type: ignore[arg-type]


class _Folder:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir


async def one_run(redis: Redis, run_dir: Path, seed: int, **sections: Any) -> World:
    """Servers that take their time, each group another one; the grader likewise."""
    job = make_job(**sections)
    await redis.flushall()
    async with running_world(redis, run_dir, job=job, servers=2) as world:
        noise = np.random.default_rng(seed)
        for server in world.servers.values():
            taking = server._sample_one

            async def slowly(body: bytes, taking: Any = taking) -> None:
                await asyncio.sleep(float(noise.random()) * 0.05)
                await taking(body)

            server._sample_one = slowly  # type: ignore[method-assign]
        await run_to_end(world)
        return world


@pytest.mark.parametrize(
    "sampling", [{}, {"oversampling": 1.7}, {"min_usable_share": 0.5}], ids=str
)
async def test_a_job_without_lag_is_the_same_whoever_comes_first(
    redis: Redis, tmp_path: Path, sampling: dict[str, float]
) -> None:
    """Nothing but `max_lag = 0`, the default, asks for it."""
    one, other = [
        await one_run(redis, tmp_path / str(seed), seed, sampling=sampling) for seed in (1, 2)
    ]
    assert one.history == other.history
    assert one.ranks.weights == other.ranks.weights
    metrics = [
        [{k: v for k, v in step.items() if k not in TIMED} for step in world.events("step")]
        for world in (one, other)
    ]
    assert metrics[0] == metrics[1]
    drawn = [names for _, names in one.history]
    assert [sorted(names) for names in drawn] == drawn


async def test_a_deterministic_job_asks_in_waves_until_it_has_enough(
    redis: Redis, tmp_path: Path
) -> None:
    """Three of four draws are useless: steps need further waves, and take the lowest draws."""

    def grade(prompt: PromptGroup, index: int) -> Outcome:
        useless = prompt.draw % 4 != 0
        return alternating(prompt.model_copy(update={"draw": 3 if useless else 0}), index)

    job = make_job(steps=2, sampling={"oversampling": 1.1})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.grade = grade
        await run_to_end(world)
        assert world.history[0][1] == [f"{JOB_ID}.g{draw:06d}" for draw in (0, 4, 8)]
