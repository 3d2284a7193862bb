import asyncio
import threading
from pathlib import Path

import pytest

from services.trainer.arbiter import Arbiter, Undecided
from services.trainer.disk import Unwritable
from services.trainer.keeper import LeftForPause
from services.trainer.ranks import RanksLost
from services.trainer.versions import VersionStore
from shared.errors import RemoteError, TandemError
from shared.tasks import end
from tests.unit.services.trainer.test_versions import publish, tidy

WORD, OTHER = "1" * 32, "2" * 32


class Ranks:
    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.read: list[bytes] = []

    async def digest(self, folder: Path) -> str:
        self.read.append(shards(folder))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def shards(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("shard-*")))


async def test_a_version_kept_as_changes_is_whole_while_it_is_digested(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    published = [publish(store, version) for version in range(3)]
    tidy(store, {2}, keep_last=50)
    assert not store.is_whole(1)
    ranks = Ranks(WORD)
    arbiter = Arbiter(store, ranks.digest)
    assert await arbiter.word(1) == await arbiter.word(1) == WORD
    assert ranks.read == [published[1]]
    tidy(store, {2}, keep_last=50)
    assert not store.is_whole(1)
    again = Ranks()
    assert await Arbiter(VersionStore(tmp_path), again.digest).word(1) == WORD


async def test_who_said_otherwise_never_served_the_version(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    publish(store, 0)
    store.keep_effective(0, OTHER)
    assert (store.expected(0), store.effective(0)) == (OTHER, OTHER)
    assert await Arbiter(store, Ranks(WORD).digest).word(0) == WORD
    assert (store.expected(0), store.effective(0)) == (WORD, None)
    store.keep_effective(0, WORD)
    assert store.effective(0) == WORD
    store.fresh_path(0)  # what is exported there next is something else
    assert store.expected(0) is None


@pytest.mark.parametrize(
    "err", [RemoteError("WeightsCorrupt", "w is not what was written"), RanksLost("killed again")]
)
async def test_ranks_that_cannot_say_or_die_of_it_are_not_asked_again(
    tmp_path: Path, err: TandemError
) -> None:
    """`RanksLost` comes once several sets of ranks were lost; a pause speaks against nothing."""
    store = VersionStore(tmp_path)
    publish(store, 0)
    ranks = Ranks(LeftForPause(), err)
    arbiter = Arbiter(store, ranks.digest)
    for error in ("paused on request", str(err), str(err)):
        with pytest.raises(Undecided, match=f"version 0 cannot be digested: .*{error}"):
            await arbiter.word(0)
    assert ranks.answers == []
    assert store.settled(0) is None


async def test_a_full_disk_is_left_to_the_job_and_the_version_is_asked_for_again(
    tmp_path: Path,
) -> None:
    store = VersionStore(tmp_path)
    for version in range(3):
        publish(store, version)
    tidy(store, {2}, keep_last=50)
    scratch = store.path(1) / "shard-00000.tmp"
    scratch.symlink_to("/dev/full")
    arbiter = Arbiter(store, Ranks(WORD).digest)
    with pytest.raises(Unwritable, match="v00000001 cannot be written"):
        await arbiter.word(1)
    scratch.unlink()
    assert await arbiter.word(1) == WORD


async def test_what_is_lent_to_somebody_who_is_gone_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that rebuilds a version goes on though nobody waits for it."""
    store = VersionStore(tmp_path)
    for version in range(3):
        publish(store, version)
    tidy(store, {2}, keep_last=50)
    begun, go_on, restore = threading.Event(), threading.Event(), store.restore

    def restore_later(version: int) -> None:
        begun.set()
        assert go_on.wait(10)
        restore(version)

    monkeypatch.setattr(store, "restore", restore_later)
    asking = asyncio.create_task(Arbiter(store, Ranks().digest).word(1))
    assert await asyncio.to_thread(begun.wait, 10)
    await end(asking)
    assert tidy(store, {2}, keep_last=1) == []  # it is being read
    go_on.set()
    async with asyncio.timeout(10):
        while tidy(store, {2}, keep_last=1) != [0, 1]:  # noqa: ASYNC110  nobody is woken
            await asyncio.sleep(0.01)
