"""The flow of groups under bounds: never stale, starved or stuck, and every end says why."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from services.trainer import feeder
from services.trainer.pausing import JobPaused
from services.trainer.prompts import DataChanged, NoPromptFits
from services.trainer.warm_up import (
    Pair,
    fitting_pairs,
    load_pairs,
    supervised_batch,
    supervised_facts,
)
from shared import topology
from shared.data import DataError, Row
from shared.messages import Outcome, PromptGroup, Score
from shared.ranked import publish_ranked
from tests.integration import conductor_world
from tests.integration.conductor_world import (
    JOB_ID,
    World,
    make_job,
    run_to_end,
    running_world,
    sampled,
)
from tests.integration.test_conductor import check_books

SEED = 13


def delay(world: World, *, most_s: float) -> None:
    """Every group takes another time to be sampled."""
    noise = np.random.default_rng(SEED)
    for server in world.servers.values():
        taking = server._sample_one

        async def slowly(body: bytes, taking: Any = taking) -> None:
            await asyncio.sleep(float(noise.random() ** 3) * most_s)
            await taking(body)

        server._sample_one = slowly  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_hundred_steps_with_random_delays_never_exceed_the_lag(
    redis: Redis, tmp_path: Path
) -> None:
    job = make_job(
        steps=200,
        algorithm={"max_lag": 3},
        sampling={"groups_per_step": 2},
        checkpoint={"every_steps": 1000},
    )
    async with running_world(redis, tmp_path / "run", job=job, servers=2) as world:
        delay(world, most_s=0.1)
        conductor = world.conductor()
        await asyncio.wait_for(conductor.run(), 280)
        await conductor.close("finished")
        steps = world.events("step")
        assert len(steps) == 200
        assert max(step["lag_max"] for step in steps) == 3  # the bound is reached, never passed
        check_books(world).close()


async def paused_with(world: World) -> str:
    conductor = world.conductor()
    with pytest.raises(JobPaused) as caught:
        await asyncio.wait_for(conductor.run(), 60)
    await conductor.close("paused", error=str(caught.value))
    return str(caught.value)


def one_good_draw(prompt: PromptGroup, index: int) -> Outcome:
    return Score(value=float(prompt.draw == 2 and index))


@pytest.mark.parametrize(
    ("sampling", "bound"),
    [
        ({"max_redraws": 2.0}, r"6 groups \(sampling.max_redraws x groups_per_step\)"),
        ({"max_wait_s": 0.5}, "sampling.max_wait_s = 0.5 is over"),
        ({"min_usable_share": 0.5}, r"of [3-9] groups are usable, less than .*_share = 0.5"),
    ],
)
async def test_whole_steps_or_none_if_the_job_says_so(
    redis: Redis, tmp_path: Path, sampling: dict[str, Any], bound: str
) -> None:
    """The bound of tries, of time, of share: which one was hit, and why groups were dropped."""
    job = make_job(sampling=sampling | {"when_short": "stop"})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.grade = one_good_draw
        world.sampling_s = 0.05
        error = await paused_with(world)
        assert world.history == []
    with pytest.raises(AssertionError, match=f"step 1: .*{bound}.*1 of 3.*no_variance_all_wrong"):
        raise AssertionError(error)


async def test_a_smaller_step_is_told(redis: Redis, tmp_path: Path) -> None:
    job = make_job(steps=1, sampling={"max_redraws": 2.0})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.grade = one_good_draw
        await run_to_end(world)
        (short,) = world.events("step_short")
        assert (short["groups"], short["wanted"]) == (1, 3)
        assert short["reasons"] == {"no_variance_all_wrong": 5}


async def test_groups_of_bad_logprobs_are_dropped_before_they_reach_a_step(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third draw comes without numbers; the step is made of the others."""

    def spoiled(prompt: PromptGroup, version: int, **names: str) -> Any:
        group = sampled(prompt, version, **names)
        if prompt.draw % 3:
            return group
        bad = [r.model_copy(update={"logprobs": r.logprobs * math.nan}) for r in group.rollouts]
        return group.model_copy(update={"rollouts": bad})

    monkeypatch.setattr(conductor_world, "sampled", spoiled)
    async with running_world(redis, tmp_path / "run", job=make_job(steps=2)) as world:
        await run_to_end(world)
        dropped = [one["group_id"] for one in world.events("group_dropped")]
        reasons = {one["reason"] for one in world.events("group_dropped")}
        assert "bad_logprobs" in reasons
        assert f"{JOB_ID}.g000000" in dropped
        check_books(world).close()


async def test_long_prompts_are_asked_first(redis: Redis, tmp_path: Path) -> None:
    rows = ["a" * length for length in (3, 30, 7, 12, 30)]
    job = make_job(data={"path": "/nowhere/rows.jsonl", "shuffle": False}, steps=2)
    job = job.model_copy(update={"sampling": job.sampling.model_copy(update={"oversampling": 1.6})})
    async with running_world(redis, tmp_path / "run", job=job, rows=rows, servers=0) as world:
        conductor = world.conductor()
        conductor.parts.progress.published_version = 0
        await conductor.parts.feeder.fill()
        entries = await redis.xrange(topology.prompts(JOB_ID))
        lengths = [
            len(PromptGroup.unpack(fields[b"body"]).prompt_token_ids) for _, fields in entries
        ]
        assert lengths == [30, 30, 12, 7, 3]
        await conductor.close(None)


async def waiting_lengths(redis: Redis) -> list[int]:
    """Of the prompts that no server has read, in the order in which they would be."""
    stream = topology.prompts(JOB_ID)
    (about,) = await redis.xinfo_groups(stream)
    entries = await redis.xrange(stream, min=f"({about['last-delivered-id'].decode()}")
    return [len(PromptGroup.unpack(fields[b"body"]).prompt_token_ids) for _, fields in entries]


async def test_long_prompts_are_asked_first_over_a_whole_step(redis: Redis, tmp_path: Path) -> None:
    """What replaces a dropped group overtakes shorter prompts that nobody has read yet."""
    rows = ["a" * length for length in (3, 30, 7, 12, 40)]
    job = make_job(data={"path": "/nowhere/rows.jsonl", "shuffle": False}, steps=2)
    async with running_world(redis, tmp_path / "run", job=job, rows=rows, servers=0) as world:
        conductor = world.conductor()
        parts, stream = conductor.parts, topology.prompts(JOB_ID)
        parts.progress.published_version = 0
        await redis.xgroup_create(stream, topology.SAMPLERS, id="0", mkstream=True)
        await parts.feeder.fill()
        await redis.xreadgroup(topology.SAMPLERS, "rollout-0", {stream: ">"}, count=1)
        assert await waiting_lengths(redis) == [7, 3]
        for draw, left in ((1, [12, 7, 3]), (2, [40, 12, 3])):
            (entry,) = [one for one in parts.books.open_groups() if one.draw == draw]
            await parts.feeder.withdraw([entry.group_id])
            await parts.collector.drop([entry], reason="surplus")
            await parts.feeder.fill()
            assert await waiting_lengths(redis) == left
        await parts.feeder.withdraw([f"{JOB_ID}.g000000"])  # also one that was overtaken twice
        assert await waiting_lengths(redis) == [40, 12]
        await conductor.close(None)


async def test_a_prompt_that_is_overtaken_while_it_is_dropped_leaves_the_stream(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["a" * length for length in (3, 30, 7, 12)]
    job = make_job(data={"path": "/nowhere/rows.jsonl", "shuffle": False}, steps=2)
    async with running_world(redis, tmp_path / "run", job=job, rows=rows, servers=0) as world:
        conductor = world.conductor()
        parts, stream = conductor.parts, topology.prompts(JOB_ID)
        parts.progress.published_version = 0
        await redis.xgroup_create(stream, topology.SAMPLERS, id="0", mkstream=True)
        await parts.feeder.fill()
        entries = {entry.draw: entry for entry in parts.books.open_groups()}
        await parts.collector.drop([entries[1]], reason="surplus")
        appended, answered = asyncio.Event(), asyncio.Event()

        async def answering_late(*args: Any, **fields: Any) -> Any:
            told = await publish_ranked(*args, **fields)
            appended.set()
            await answered.wait()
            return told

        monkeypatch.setattr(feeder, "publish_ranked", answering_late)
        filling = asyncio.create_task(parts.feeder.fill())
        await asyncio.wait_for(appended.wait(), 60)
        assert await waiting_lengths(redis) == [12, 7, 3]
        dropping = asyncio.create_task(parts.collector.drop([entries[2]], reason="surplus"))
        await asyncio.wait({dropping}, timeout=0.3)  # time enough to go wrong
        answered.set()
        await asyncio.wait_for(asyncio.gather(filling, dropping), 60)
        assert await waiting_lengths(redis) == [12, 3]
        await conductor.close(None)


@pytest.mark.parametrize("rows", [["one", "two"], ["same"] * 10])
async def test_few_or_equal_rows_are_groups_of_their_own(
    redis: Redis, tmp_path: Path, rows: list[str]
) -> None:
    """A data set smaller than a step is gone through again; equal prompts are sampled apart."""
    async with running_world(redis, tmp_path / "run", job=make_job(), rows=rows) as world:
        world.grade = lambda prompt, index: Score(value=float(index % 2))
        await run_to_end(world)
        books = check_books(world)
        assert books.next_draw() >= 12
        books.close()


async def test_a_resume_at_an_epochs_end_takes_the_remaining_steps(
    redis: Redis, tmp_path: Path
) -> None:
    """Six rows are two steps; the process ends after each of them, and nothing is drawn twice."""
    rows = [f"problem {i}" for i in range(6)]
    drawn = []
    for name, crash_at in (("calm", []), ("ended", ["told", "told"])):
        await redis.flushall()
        async with running_world(redis, tmp_path / name, job=make_job(), rows=rows) as world:
            world.grade = lambda prompt, index: Score(value=float(index % 2))
            await run_to_end(world, crash_at=crash_at)
            assert [step["step"] for step in world.events("step")] == [1, 2, 3, 4]
            drawn.append(world.history)
    assert dict(drawn[0]) == dict(drawn[1])


EDITS: list[Callable[[list[Row]], list[Row]]] = [
    lambda rows: [*rows, replace(rows[0], index=len(rows))],
    lambda rows: rows[:-1],
    lambda rows: [replace(rows[0], gold="1"), *rows[1:]],
    lambda rows: [replace(rows[0], prompt="x" * 60), *rows[1:]],
    lambda rows: list(reversed(rows)),
]


@pytest.mark.parametrize("edit", EDITS, ids=["more", "fewer", "gold", "too long", "order"])
async def test_data_that_was_edited_while_the_job_was_paused_is_refused(
    redis: Redis, tmp_path: Path, edit: Callable[[list[Row]], list[Row]]
) -> None:
    """Draws are row numbers: other rows would be drawn twice or never. The old ones go on."""
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        first = world.conductor()
        first._on_point = lambda now: now == "committed" and first.pause_asked.set()
        with pytest.raises(JobPaused):
            await asyncio.wait_for(first.run(), 60)
        await first.close("paused")
        source, rows = world.source, edit(list(world.source.rows))
        world.source = replace(source, rows=rows)
        again = world.conductor()
        begun = (
            r"data\.path /nowhere/rows\.jsonl is not what this run began with: 10 rows, xxh3 \w+"
        )
        with pytest.raises(DataChanged, match=f"{begun} then, {len(rows)} rows, xxh3 .* now"):
            await asyncio.wait_for(again.run(), 60)
        await again.close("failed")
        world.source = source
        await run_to_end(world)
        check_books(world).close()


async def test_pairs_that_were_edited_between_two_supervised_steps_are_refused(
    redis: Redis, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "say 1", "response": "1"}\n')
    job = make_job(steps=4, warm_up={"path": str(pairs), "steps": 2, "pairs_per_step": 1})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        first = world.conductor()
        train = first.parts.keeper.train

        async def train_and_pause(step: int) -> dict[str, Any]:
            first.pause_asked.set()
            return await train(step)

        first.parts.keeper.train = train_and_pause  # type: ignore[method-assign]
        with pytest.raises(JobPaused):
            await asyncio.wait_for(first.run(), 60)
        await first.close("paused")
        assert [step for step, _ in world.history] == [1]
        pairs.write_text('{"prompt": "say 1", "response": "2"}\n')
        again = world.conductor()
        with pytest.raises(DataChanged, match=r"warm_up\.path .*: 1 pairs, xxh3 .* then, 1 pairs"):
            await asyncio.wait_for(again.run(), 60)
        await again.close("failed")
        assert [step for step, _ in world.history] == [1]


async def test_a_resume_after_the_last_step_says_so(redis: Redis, tmp_path: Path) -> None:
    async with running_world(redis, tmp_path / "run", job=make_job()) as world:
        await run_to_end(world)
        trained = list(world.history)
        again = world.conductor()
        await asyncio.wait_for(again.run(), 60)
        await again.close("finished")
        assert world.history == trained
        assert world.events("no_steps_left") == [{"step": 4, "steps": 4}]


async def test_supervised_steps_come_first_and_are_durable_like_others(
    redis: Redis, tmp_path: Path
) -> None:
    """The process dies after each of the first steps; no group is sampled by their versions."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"say {i}", "response": str(i)} for i in range(5)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = make_job(steps=4, warm_up={"path": str(pairs), "steps": 2, "pairs_per_step": 3})
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.rank_faults += ["train_step:2"]
        await run_to_end(world, crash_at=["committed"])
        steps = world.events("step")
        assert [step.get("supervised", False) for step in steps] == [True, True, False, False]
        assert [step["groups"] for step in steps] == [0, 0, 3, 3]
        assert [groups for _, groups in world.history][:2] == [[], []]
        assert world.events("weights_published")[0]["policy_version"] == 2


@pytest.mark.parametrize(
    ("crash_at", "rank_faults"),
    [
        ([], []),
        (["committed", "saved", "told"], []),
        (["told"], ["train_step:1", "save:2", "train_step:5"]),
    ],
    ids=["whole", "conductor dies", "ranks die"],
)
async def test_the_reference_is_what_the_warm_up_made_whoever_dies(
    redis: Redis, tmp_path: Path, crash_at: list[str], rank_faults: list[str]
) -> None:
    """Only the newest checkpoint is kept, and each restart begins there; the reference's stays."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "say 1", "response": "1"}\n')
    job = make_job(
        steps=6,
        warm_up={"path": str(pairs), "steps": 2, "pairs_per_step": 1},
        algorithm={"kl": {"coefficient": 0.1}},
        checkpoint={"every_steps": 1, "keep_last": 1},
    )
    async with running_world(redis, tmp_path / "run", job=job) as world:
        world.rank_faults += rank_faults
        await run_to_end(world, crash_at=crash_at)
        assert sorted(world.references) == [3, 4, 5, 6]
        kept = json.loads((tmp_path / "run/checkpoints/step00000002/complete.json").read_text())
        assert set(world.references.values()) == {bytes.fromhex(kept["weights"])}
        held = {path.name for path in (tmp_path / "run/checkpoints").glob("step*")}
        assert held == {"step00000002", "step00000006"}


def test_pairs_are_a_function_of_the_step_and_end_with_the_stop_token() -> None:
    job = make_job(
        steps=4,
        warm_up={"path": "unused", "steps": 2, "pairs_per_step": 3},
        data={"path": "/nowhere", "shuffle": False},
    )
    source = conductor_world.make_source(job)
    given = [Pair(f"say {i}", "x" * (i + 1)) for i in range(4)]
    pairs, skipped = fitting_pairs(given, source)
    assert skipped == {}
    batches = [
        supervised_batch(pairs, source=source, step=step, policy_version=step - 1)
        for step in (1, 2, 2)
    ]
    assert batches[1].pack() == batches[2].pack()
    texts = [bytes(s.token_ids.astype(np.uint8)) for batch in batches[:2] for s in batch.samples]
    assert texts[:4] == [b"say 0x\0", b"say 1xx\0", b"say 2xxx\0", b"say 3xxxx\0"]
    assert texts[4] == texts[0]  # the next epoch


def test_pairs_that_do_not_fit_are_skipped_and_told() -> None:
    """Prompts of 56 tokens fit; a response is cut to 8, and then lacks its stop token."""
    job = make_job(
        steps=4,
        warm_up={"path": "unused", "steps": 2, "pairs_per_step": 2},
        data={"path": "/nowhere", "shuffle": False},
    )
    source = conductor_world.make_source(job)
    given = [Pair("a" * size, "b" * 9, line) for line, size in enumerate((57, 56, 99, 3), start=1)]
    pairs, told = fitting_pairs(given, source)
    assert [len(pair.prompt_ids) for pair in pairs] == [56, 3]
    assert told == {"number": 2, "first_line": 1, "longest": 99, "limit": 56}
    batch = supervised_batch(pairs, source=source, step=1, policy_version=0)
    assert supervised_facts(batch, stop_token_ids=[0])["truncated_share"] == 1.0
    with pytest.raises(NoPromptFits, match=r"none of the 1 prompts of .* fits into 56"):
        fitting_pairs(given[:1], source)


def test_pairs_that_are_not_utf_8_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff", "response": "b"}\n')
    with pytest.raises(DataError, match=r"line 2: .*UTF-8"):
        load_pairs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n', "line 1: a pair needs `prompt` and `response`"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": 1, "response": "b"}\n', "line 2: a pair"),
        ("", "there are no pairs"),
    ],
)
def test_pairs_that_are_none_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_pairs(path)
