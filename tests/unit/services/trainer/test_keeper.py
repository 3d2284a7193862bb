import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.disk import Unwritable
from services.trainer.entries import BooksViolated, Draw
from services.trainer.events import EventLog, event_maker
from services.trainer.keeper import MAX_RESTARTS_IN_A_ROW, RankKeeper, StepRefused
from services.trainer.ranks import RanksLost
from shared.errors import Rejected, RemoteError


class Ranks:
    """Remember what they trained; die, refuse or hang where they are told to."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.trained: list[bytes] = []
        self.replayed: list[bytes] = []  # of those
        self.stopped = False

    async def load(self, path: Path, reference: Path | None = None) -> int:
        saved = json.loads((path / "complete.json").read_text())
        if saved["broken"]:
            raise RemoteError("WeightsCorrupt", "a checksum is wrong")
        self.reference = None if reference is None else reference.name
        self.trained = [b"%d" % step for step in range(1, saved["step"] + 1)]
        return int(saved["step"])

    async def train_step(self, batch: bytes, *, is_replay: bool = False) -> dict[str, Any]:
        if is_replay:
            self.replayed.append(batch)
        if self.world.hang is not None and self is not self.world.started[0]:
            await self.world.hang.wait()
        if batch in self.world.lose_at:
            self.world.lose_at.remove(batch)
            raise RanksLost("killed")
        if batch in self.world.refuse:
            raise Rejected("not this one")
        self.trained.append(batch)
        if self.world.late is not None:
            await self.world.late.wait()
        return {"loss": float(batch), "logprobs": batch}

    async def export(self, policy_version: int, path: Path) -> dict[str, Any]:
        return {}

    async def save(self, step: int, path: Path, *, wait: bool) -> dict[str, Any]:
        if self.world.is_full:
            raise RemoteError("Unwritable", f"{path} cannot be written")
        os.makedirs(path)  # noqa: PTH103
        saved = {"step": step, "broken": step in self.world.broken}
        (path / "complete.json").write_text(json.dumps(saved))
        return {}

    async def score(self, sequences: Any, temperature: float, rounding: str) -> list[list[float]]:
        if self.world.lose_at_score:
            self.world.lose_at_score = False
            raise RanksLost("killed")
        return []

    async def stop(self) -> None:
        self.stopped = True


class World:
    def __init__(
        self, run_dir: Path, keep_checkpoints: int = 2, keep_every: int | None = None, **traits: int
    ) -> None:
        self.lose_at: list[bytes] = []
        self.lose_at_score = False
        self.refuse: set[bytes] = set()
        self.broken: set[int] = set()
        self.is_full = False
        self.hang: asyncio.Event | None = None
        self.late: asyncio.Event | None = None  # answers of steps that are taken
        self.started: list[Ranks] = []
        self.books = Books(run_dir / BOOKS_FILE)
        self.record = EventLog(run_dir, self.books)
        self.keeper = RankKeeper(
            self.start,
            books=self.books,
            run_dir=run_dir,
            keep_checkpoints=keep_checkpoints,
            keep_every=keep_every,
            **traits,
            record=self.record,
            events=event_maker("j", "t"),
        )

    async def start(self) -> Ranks:
        self.started.append(Ranks(self))
        return self.started[-1]

    def commit(self, step: int) -> None:
        self.books.record_draws([Draw(step - 1, f"g{step}", 0)])
        self.books.commit_batch(
            step, body=b"%d" % step, group_ids=[f"g{step}"], policy_version=step, batch_facts={}
        )

    async def train(self, *steps: int) -> None:
        for step in steps:
            self.commit(step)
            assert await self.keeper.train(step) == {"loss": float(step)}

    @property
    def names(self) -> list[str]:
        return [body["name"] for _, body in self.books.journal(0)]


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest):
    world = World(tmp_path, **getattr(request, "param", {}))
    yield world
    world.record.close()
    world.books.close()


async def test_lost_ranks_are_replaced_and_replayed(world: World) -> None:
    await world.keeper.restore()
    await world.train(1, 2)
    await world.keeper.save(2)
    world.lose_at = [b"4"]
    await world.train(3, 4, 5)
    first, second = world.started
    assert first.stopped
    assert second.trained == [b"1", b"2", b"3", b"4", b"5"]
    assert world.names == ["checkpoint_saved", "rank_restarted", "replayed"]


async def test_broken_checkpoint_is_passed_over(world: World) -> None:
    await world.keeper.restore()
    world.broken = {4}
    for step in range(1, 6):
        await world.train(step)
        if step in (2, 4):
            await world.keeper.save(step)
    world.lose_at = [b"6"]
    await world.train(6)
    assert world.started[-1].trained == [b"%d" % step for step in range(1, 7)]
    assert world.started[-2].stopped
    assert "checkpoint_refused" in world.names


async def test_batches_and_checkpoints_that_nobody_needs_are_forgotten(world: World) -> None:
    await world.keeper.restore()
    for step in range(1, 7):
        await world.train(step)
        if step % 2 == 0:
            await world.keeper.save(step)
    assert [step for step, _ in world.keeper.complete_checkpoints()] == [4, 6]
    assert world.books.redo_steps(4) == [5, 6]
    await world.keeper.save_if_newer(6)
    assert world.names.count("checkpoint_saved") == 3


async def test_ranks_that_die_again_and_again_are_given_up(world: World) -> None:
    await world.keeper.restore()
    world.lose_at = [b"1"] * 10
    with pytest.raises(RanksLost):
        await world.train(1)
    assert len(world.started) == MAX_RESTARTS_IN_A_ROW + 1
    assert all(ranks.stopped for ranks in world.started)


async def test_a_checkpoint_without_room_is_told_until_the_job_pauses(world: World) -> None:
    """To whoever asks next, too: it may have been written in the background."""
    await world.keeper.restore()
    await world.train(1)
    world.is_full = True
    with pytest.raises(Unwritable, match="step00000001 cannot be written"):
        await world.keeper.save(1)
    world.is_full = False
    world.commit(2)
    with pytest.raises(Unwritable, match="step00000001 cannot be written"):
        await world.keeper.train(2)
    assert len(world.started) == 1
    again = World(world.record.path.parent)  # the job is resumed
    await again.keeper.restore()
    assert again.started[0].trained == [b"1", b"2"]
    again.record.close()
    again.books.close()


async def test_ranks_that_die_where_there_is_no_room_are_not_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.keeper.restore()
    world.lose_at = [b"1"]
    free = shutil.disk_usage(world.record.path.parent)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(Unwritable, match=r"written: killed \(4,096 bytes are free there\)"):
        await world.train(1)
    assert len(world.started) == 1


async def test_refused_step_leaves_the_ranks_as_they_were(world: World) -> None:
    await world.keeper.restore()
    await world.train(1)
    world.refuse = {b"2"}
    world.commit(2)
    with pytest.raises(StepRefused, match="step 2 was refused: not this one"):
        await world.keeper.train(2)
    (ranks,) = world.started
    assert not ranks.stopped
    again = World(world.record.path.parent)  # the process died before it could undo the step
    again.refuse = {b"2"}
    with pytest.raises(StepRefused):
        await again.keeper.restore()
    again.books.refuse_step(2, reason="refused", events=[])
    await again.keeper.restore()
    (ranks,) = again.started
    assert ranks.trained == [b"1"]
    again.record.close()
    again.books.close()


async def test_impatient_caller_leaves_no_half_restored_ranks(world: World) -> None:
    await world.keeper.restore()
    await world.train(1, 2)
    world.lose_at = [b"3"]
    world.commit(3)
    world.hang = asyncio.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.keeper.train(3), 1.0)
    assert len(world.started) == 2
    assert world.started[-1].stopped
    world.hang = None
    assert await world.keeper.train(3) == {"loss": 3.0}
    assert world.started[-1].trained == [b"1", b"2", b"3"]


async def test_closed_keeper_starts_nothing(world: World) -> None:
    await world.keeper.restore()
    await world.keeper.close()
    assert world.started[-1].stopped
    with pytest.raises(RanksLost, match="the job is ending"):
        await world.keeper.score([[1, 2]], temperature=1.0)
    assert len(world.started) == 1


@pytest.mark.parametrize("world", [{"keep_checkpoints": 1, "reference_step": 2}], indirect=True)
async def test_the_references_checkpoint_stays_and_is_named_when_later_ones_are_loaded(
    world: World,
) -> None:
    await world.keeper.restore()
    await world.train(1, 2)
    for _ in range(2):  # the second finds it there
        await world.keeper.save_reference()
    await world.train(3, 4)
    await world.keeper.save(4)
    assert [step for step, _ in world.keeper.complete_checkpoints()] == [2, 4]
    world.lose_at.append(b"5")
    await world.train(5)
    assert world.started[-1].reference == "step00000002"
    assert world.names.count("checkpoint_saved") == 2


@pytest.mark.parametrize("world", [{"keep_checkpoints": 1, "keep_every": 2}], indirect=True)
async def test_every_so_manieth_checkpoint_is_kept_for_good(world: World) -> None:
    await world.keeper.restore()
    for step in range(1, 6):
        await world.train(step)
        await world.keeper.save(step)
    assert [step for step, _ in world.keeper.complete_checkpoints()] == [2, 4, 5]


async def test_ranks_that_finished_a_step_for_nobody_are_not_saved_and_replaced(
    world: World,
) -> None:
    """Nobody knows what they hold: whether the step was taken, and what it came to."""
    await world.keeper.restore()
    await world.train(1)
    world.late = asyncio.Event()
    world.commit(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.keeper.train(2), 1.0)
    assert world.started[0].trained == [b"1", b"2"]
    world.late = None
    await world.keeper.save_if_newer(2)
    assert world.keeper.complete_checkpoints() == []
    assert await world.keeper.train(2) == {"loss": 2.0}
    assert [ranks.stopped for ranks in world.started] == [True, False]
    assert world.started[1].trained == [b"1", b"2"]
    await world.keeper.save_if_newer(2)
    assert [step for step, _ in world.keeper.complete_checkpoints()] == [2]


async def test_what_is_not_trained_yet_is_not_saved(world: World) -> None:
    await world.keeper.restore()
    await world.train(1)
    world.commit(2)
    await world.keeper.save_if_newer(2)
    assert world.keeper.complete_checkpoints() == []


async def test_a_step_that_a_checkpoint_holds_is_never_trained_again(world: World) -> None:
    """Its result is lost, and its batch may be."""
    await world.keeper.restore()
    await world.train(1, 2)
    await world.keeper.save(2)
    again = World(world.record.path.parent)
    await again.keeper.restore()
    assert await again.keeper.train(2) == {}
    assert again.started[0].trained == [b"1", b"2"]
    again.record.close()
    again.books.close()


async def test_a_checkpoint_that_holds_another_step_is_passed_over(world: World) -> None:
    await world.keeper.restore()
    await world.train(1, 2)
    await world.keeper.save(2)
    (_, path) = world.keeper.complete_checkpoints()[0]
    path.rename(path.with_name("step00000003"))
    world.commit(3)
    world.lose_at = [b"3"]
    with pytest.raises(BooksViolated):  # there is no other
        await world.keeper.train(3)
    assert "checkpoint_refused" in world.names


async def test_ranks_are_told_which_steps_were_taken_before(world: World) -> None:
    """They may refuse a step of which nobody has a result, and no other."""
    await world.keeper.restore()
    for step in (1, 2):
        await world.train(step)
        world.books.keep_result(step, {})
    world.lose_at = [b"3"]
    await world.train(3)
    assert world.started[-1].trained == [b"1", b"2", b"3"]
    assert world.started[-1].replayed == [b"1", b"2"]


async def test_whoever_asks_is_told_which_step_is_held_by_the_ranks_that_answer(
    world: World,
) -> None:
    """New ones train the newest batch, which those that were lost did not hold yet."""
    await world.keeper.restore()
    await world.train(1)
    world.commit(2)
    held: list[int] = []
    world.lose_at_score = True
    await world.keeper.score([[1, 2]], temperature=1.0, check=held.append)
    assert held == [1, 2]


async def test_log_probabilities_are_those_of_the_step_or_none(world: World) -> None:
    await world.keeper.restore()
    await world.train(1)
    assert world.keeper.logprobs == b"1"
    world.commit(2)
    world.lose_at_score = True
    await world.keeper.score([[1, 2]], temperature=1.0)
    assert await world.keeper.train(2) == {"loss": 2.0}  # by the replay
    assert world.keeper.logprobs == b"2"
    await world.keeper.save(2)
    world.lose_at_score = True
    await world.keeper.score([[1, 2]], temperature=1.0)
    assert await world.keeper.train(2) == {}  # by the checkpoint
    assert world.keeper.logprobs == b""
