"""Staging a version: whatever is wrong is found before anything is served, and named."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from services.rollout.engine.engine import Engine
from services.rollout.staging import Stager, StagingStopped
from services.rollout.weights import (
    CommitFailed,
    NotAsExpected,
    UpdateConflict,
    Updates,
    UpdateUnknown,
)
from shared.errors import ChannelClosed, DeadlineExceeded, RemoteError
from shared.tasks import end
from shared.weights.manifest import Manifest, TensorEntry, shard_file
from shared.weights.protocol import (
    BeginUpdate,
    CommitResult,
    CommitUpdate,
    GroupTransfer,
    Probe,
    ProbeSequence,
    UpdateStatus,
)
from tests.integration.rollout_world import (
    JOB_ID,
    Trainer,
    canonical_weights,
    eventually,
    serving_trainer,
    write_version,
)
from tests.tiny_deepseek_v4 import DEMO


class StandIn:
    """An engine that activates at once, refuses, or does not answer."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(arch=DEMO.with_format("fp8"), context_length=64)
        self.policy_version: int | None = None
        self.died = asyncio.Event()
        self.refuse = False
        self.checks = True  # the effective checksum, before the version is served
        self.is_silent = False
        self.may_activate = asyncio.Event()
        self.may_activate.set()
        self.activated: list[tuple[int, list[str]]] = []

    async def activate(
        self, folder: Path, commit: CommitUpdate, *, timeout_s: float
    ) -> CommitResult:
        await self.may_activate.wait()
        if self.is_silent:
            raise DeadlineExceeded("the engine", timeout_s)
        if self.refuse:
            raise RemoteError("WeightsCorrupt", "probe: mean |delta log p| 3 exceeds 0.1")
        if self.checks and commit.effective_checksum not in (None, "0" * 32):
            raise RemoteError("OtherValues", f"expected was {commit.effective_checksum}")
        self.policy_version = int(folder.name[1:])
        files = await asyncio.to_thread(lambda: sorted(f.name for f in folder.iterdir()))
        self.activated.append((self.policy_version, files))
        phases = dict.fromkeys(("pause_s", "load_s", "restore_s", "probe_s", "resume_s"), 0.0)
        return CommitResult(
            version=self.policy_version, effective_checksum="0" * 32, **cast(Any, phases)
        )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("published")
    for version in (1, 2, 3):
        write_version(folder / str(version), canonical_weights(version), version)
    return {version: folder / str(version) for version in (1, 2, 3)}


@pytest_asyncio.fixture
async def trainer(published: dict[int, Path]) -> AsyncIterator[Trainer]:
    async with serving_trainer() as trainer:
        trainer.versions = dict(published)
        yield trainer


@pytest.fixture
def engine() -> StandIn:
    return StandIn()


@pytest_asyncio.fixture
async def updates(engine: StandIn, tmp_path: Path) -> AsyncIterator[Updates]:
    updates = Updates(
        cast(Engine, engine),
        job_id=JOB_ID,
        folder=tmp_path / "staging",
        deadline_s=5.0,
        activation_limit_s=9.0,
        max_bytes=2**30,
        on_change=lambda: None,
    )
    yield updates
    await updates.close()


def begin(
    updates: Updates,
    trainer: Trainer,
    version: int,
    manifest: Manifest | None = None,
    **fields: Any,
) -> UpdateStatus:
    values = {
        "job_id": JOB_ID,
        "version": version,
        "manifest": manifest or trainer.manifest(version),
        "sources": [trainer.url],
    }
    return updates.begin(BeginUpdate(**(values | fields)), known_sources=[trainer.url])


async def outcome(updates: Updates, version: int) -> UpdateStatus:
    async def ended() -> bool:
        return updates.status(version).state != "staging"

    await eventually(ended, f"version {version} to be staged or refused")
    return updates.status(version)


async def test_a_version_is_staged_committed_and_repeated(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    assert begin(updates, trainer, 1).state == "staging"
    assert begin(updates, trainer, 1).version == 1  # the same update, not a conflict
    status = await outcome(updates, 1)
    assert (status.state, status.staged_bytes) == ("staged", status.total_bytes)
    num_shards = len(trainer.manifest(1).shards)
    assert len(trainer.requests) == num_shards > 3
    result = await updates.commit(1, CommitUpdate())
    assert await updates.commit(1, CommitUpdate()) == result
    assert begin(updates, trainer, 1).state == "active"
    ((_, files),) = engine.activated
    assert files == ["manifest.json", *(shard_file(i) for i in range(num_shards))]


async def test_order_of_versions_is_kept(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    begin(updates, trainer, 2)
    with pytest.raises(UpdateConflict, match=r"version 3 cannot begin: version 2 is stag"):
        begin(updates, trainer, 3)
    with pytest.raises(UpdateUnknown, match="no update of version 3"):
        updates.status(3)
    await outcome(updates, 2)
    await updates.commit(2, CommitUpdate())
    with pytest.raises(UpdateConflict, match="version 1 is not above active version 2"):
        begin(updates, trainer, 1)
    with pytest.raises(UpdateConflict, match="job other-1 is not served here"):
        begin(updates, trainer, 3, job_id="other-1")
    with pytest.raises(UpdateConflict, match="came before with another manifest"):
        begin(updates, trainer, 2, trainer.manifest(3).model_copy(update={"policy_version": 2}))
    with pytest.raises(ValueError, match="is no registered peer"):
        begin(updates, trainer, 3, sources=["http://10.0.0.1"])


async def test_one_flipped_bit_is_named_and_nothing_is_served(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    manifest = trainer.manifest(1)
    victim = next(t for t in manifest.tensors if t.shard == 2 and t.num_bytes > 1000)

    def flip(version: int, shard: int, body: bytes) -> bytes:
        if shard != victim.shard:
            return body
        at = victim.offset + 500
        return body[:at] + bytes([body[at] ^ 8]) + body[at + 1 :]

    trainer.spoil = flip
    begin(updates, trainer, 1)
    status = await outcome(updates, 1)
    assert (status.state, status.is_wrong) == ("failed", True)
    assert f"checksum of {victim.name} differs" in status.error
    with pytest.raises(UpdateConflict, match="version 1 is failed"):
        await updates.commit(1, CommitUpdate())
    assert engine.activated == []

    trainer.spoil = lambda version, shard, body: body
    trainer.requests.clear()
    begin(updates, trainer, 1)
    assert (await outcome(updates, 1)).state == "staged"
    again = {shard for _, shard, _ in trainer.requests}
    assert {2} <= again <= set(range(2, len(manifest.shards)))


async def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    updates: Updates, trainer: Trainer
) -> None:
    trainer.cut_after = {1: 70_000}
    begin(updates, trainer, 1)
    assert (await outcome(updates, 1)).state == "staged"
    offsets = [offset for _, shard, offset in trainer.requests if shard == 1]
    assert offsets == [0, 70_000]


async def test_a_dead_source_is_passed_over(updates: Updates, trainer: Trainer) -> None:
    gone = "http://127.0.0.1:9"
    request = BeginUpdate(
        job_id=JOB_ID, version=1, manifest=trainer.manifest(1), sources=[gone, trainer.url]
    )
    updates.begin(request, known_sources=[gone, trainer.url])
    assert (await outcome(updates, 1)).state == "staged"


async def test_sources_that_cannot_be_asked_say_nothing_against_a_version(
    updates: Updates, trainer: Trainer
) -> None:
    gone = "http://127.0.0.1:9"
    request = BeginUpdate(job_id=JOB_ID, version=1, manifest=trainer.manifest(1), sources=[gone])
    updates.begin(request, known_sources=[gone])
    status = await outcome(updates, 1)
    assert (status.state, status.is_wrong) == ("failed", False)
    assert gone in status.error


async def test_a_manifest_that_does_not_fit_the_model_pulls_nothing(
    updates: Updates, trainer: Trainer
) -> None:
    manifest = trainer.manifest(1)

    def with_tensor(victim: str, fields: dict[str, Any]) -> Manifest:
        tensors = [
            TensorEntry(**(t.model_dump() | fields)) if t.name == victim else t
            for t in manifest.tensors
        ]
        return manifest.model_copy(update={"tensors": tensors})

    wrong = {
        "layers.1.attn.wkv.weight": {"shape": [128, 64]},
        "layers.0.attn.attn_sink": {"dtype": "BF16", "shape": [8]},
        "layers.0.ffn.gate.tid2eid": {"name": "layers.0.ffn.gate.table"},
    }
    for name, fields in wrong.items():
        begin(updates, trainer, 1, with_tensor(name, fields))
        status = await outcome(updates, 1)
        assert (status.state, name in status.error) == ("failed", True)
    assert "expected I64[320, 2], found none" in status.error
    assert trainer.requests == []


async def test_abort_while_staging_frees_the_server(updates: Updates, trainer: Trainer) -> None:
    trainer.answering.clear()
    begin(updates, trainer, 1)
    assert (await updates.abort(1)).state == "aborted"
    trainer.answering.set()
    begin(updates, trainer, 2)
    assert (await outcome(updates, 2)).state == "staged"
    assert (await updates.abort(2)).state == "aborted"


async def test_what_an_aborted_update_still_gets_is_not_written_over_the_next_one(
    trainer: Trainer, published: dict[int, Path], tmp_path: Path
) -> None:
    """A slow source that lies goes on sending after its update was given up and begun again."""
    lies, go_on, sent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = trainer.manifest(1).shards[0].num_bytes
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        await writer.drain()
        lies.set()
        await go_on.wait()
        writer.write(b"?" * size)
        await writer.drain()
        await reader.read()  # until the client hangs up
        writer.close()
        sent.set()

    whole = trainer.manifest(1)
    tensors = [one for one in whole.tensors if one.shard == 0]
    manifest = Manifest.model_validate(
        whole.model_dump() | {"shards": whole.shards[:1], "tensors": tensors}
    )
    slow = await asyncio.start_server(answer, "127.0.0.1", 0)
    liar = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    folder = tmp_path / "staged"
    folder.mkdir()

    def stager(source: str) -> Stager:
        begin = BeginUpdate(job_id=JOB_ID, version=1, manifest=manifest, sources=[source])
        return Stager(begin, folder, None, deadline_s=20.0)

    first = stager(liar)
    pulling = asyncio.create_task(asyncio.to_thread(first.bring_all))
    await asyncio.wait_for(lies.wait(), 60)
    first.progress.stopped.set()
    await asyncio.to_thread(stager(trainer.url).bring_all)
    go_on.set()
    with pytest.raises(StagingStopped, match="version 1"):
        await asyncio.wait_for(pulling, 60)
    await asyncio.wait_for(sent.wait(), 60)
    staged = await asyncio.to_thread((folder / shard_file(0)).read_bytes)
    assert staged == await asyncio.to_thread((published[1] / shard_file(0)).read_bytes)
    slow.close()
    await slow.wait_closed()


async def test_a_trainer_that_never_commits_does_not_block_the_next(
    engine: StandIn, trainer: Trainer, tmp_path: Path
) -> None:
    updates = Updates(
        cast(Engine, engine),
        job_id=JOB_ID,
        folder=tmp_path,
        deadline_s=0.3,
        activation_limit_s=0.3,
        max_bytes=2**30,
        on_change=lambda: None,
    )
    begin(updates, trainer, 1)

    async def accepts_next() -> bool:
        try:
            return begin(updates, trainer, 2).version == 2
        except UpdateConflict:
            return False

    await eventually(accepts_next, "version 1 to be given up")
    assert (await outcome(updates, 2)).state == "staged"


async def test_a_refused_commit_leaves_the_way_open(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    engine.refuse = True
    with pytest.raises(CommitFailed, match="probe"):
        await updates.commit(1, CommitUpdate())
    assert updates.status(1).state == "failed"
    engine.refuse = False
    begin(updates, trainer, 1)
    assert (await outcome(updates, 1)).state == "staged"
    assert (await updates.commit(1, CommitUpdate())).version == 1


async def test_an_engine_that_does_not_answer_a_commit_is_restarted(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    """It may still apply the version: what is served is unknown."""
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    engine.is_silent = True
    sentence = "waited 9 s for the engine; the engine is restarted"
    with pytest.raises(CommitFailed, match=f"version 1: {sentence}"):
        await updates.commit(1, CommitUpdate())
    assert engine.died.is_set()
    status = updates.status(1)
    assert (status.state, status.error) == ("failed", "waited 9 s for the engine")


async def test_a_commit_that_is_repeated_joins_the_first(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    """As a trainer does whose connection broke off."""
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    engine.may_activate.clear()
    first = asyncio.create_task(updates.commit(1, CommitUpdate()))
    again = asyncio.create_task(updates.commit(1, CommitUpdate(effective_checksum="0" * 32)))
    await asyncio.sleep(0)
    await end(first)
    engine.may_activate.set()
    assert (await asyncio.wait_for(again, 60)).version == 1
    assert len(engine.activated) == 1

    begin(updates, trainer, 2)
    await outcome(updates, 2)
    engine.refuse = True
    for _ in range(2):
        with pytest.raises(CommitFailed, match="probe"):
            await updates.commit(2, CommitUpdate())
    assert (await updates.commit(1, CommitUpdate())).version == 1  # that is served, as before
    assert not engine.died.is_set()


async def test_other_values_than_expected_are_refused_or_told(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    """Told by an engine that knows them too late: whoever expected others may be wrong himself."""
    other = CommitUpdate(effective_checksum="1" * 32)
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    with pytest.raises(NotAsExpected, match=r"version 1 was refused: .*expected was 1{32}"):
        await updates.commit(1, other)
    assert engine.activated == []
    engine.checks = False
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    assert (await updates.commit(1, other)).effective_checksum == "0" * 32
    assert not engine.died.is_set()


async def test_a_server_that_serves_other_values_than_were_published_begins_anew(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    """Nobody knew when it took them; there is no version to go back to."""
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    await updates.commit(1, CommitUpdate())
    with pytest.raises(NotAsExpected, match=r"checksum 0{32}, expected was 1{32}"):
        await updates.commit(1, CommitUpdate(effective_checksum="1" * 32))
    assert engine.died.is_set()


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    [
        ([1] * 65, "probe sequence 1 has 65 tokens, allowed are 2 to 64"),
        ([1, 2, 320], "probe sequence 1: token id 320 is outside the vocabulary of 320"),
    ],
)
async def test_a_probe_that_does_not_fit_the_engine_is_refused(
    updates: Updates, trainer: Trainer, engine: StandIn, token_ids: list[int], sentence: str
) -> None:
    probes = [
        ProbeSequence(token_ids=ids, logprobs=[-1.0] * (len(ids) - 1))
        for ids in ([3] * 64, token_ids)
    ]
    begin(updates, trainer, 1)
    await outcome(updates, 1)
    commit = CommitUpdate(probe=Probe(sequences=probes, max_mean_abs_delta=1.0))
    with pytest.raises(CommitFailed, match=sentence):
        await updates.commit(1, commit)
    assert (updates.status(1).state, engine.activated) == ("failed", [])


async def test_whatever_goes_wrong_in_staging_ends_the_transaction(
    updates: Updates, trainer: Trainer, engine: StandIn
) -> None:
    """An error that nobody thought of, and an engine that goes away while it is sent shards."""
    sources = ["ftp://127.0.0.1/"]
    request = BeginUpdate(job_id=JOB_ID, version=1, manifest=trainer.manifest(1), sources=sources)
    updates.begin(request, known_sources=["ftp://127.0.0.1"])
    status = await outcome(updates, 1)
    assert status.state == "failed"
    assert "not an http address" in status.error

    async def receive(folder: Path, group: GroupTransfer) -> None:
        raise ChannelClosed("receive: the child is gone")

    cast(Any, engine).receive = receive
    group = GroupTransfer(
        name="g",
        backend="gloo",
        host="127.0.0.1",
        port=1,
        rank=1,
        members=["rank 0", "server"],
        deadline_s=1.0,
    )
    begin(updates, trainer, 2, group=group)
    status = await outcome(updates, 2)
    assert (status.state, "the child is gone" in status.error) == ("failed", True)
    begin(updates, trainer, 3)
    assert (await outcome(updates, 3)).state == "staged"


async def test_files_of_the_version_before_the_last_are_written_over(
    updates: Updates, trainer: Trainer, published: dict[int, Path], tmp_path: Path
) -> None:
    """Also when the transfer breaks off: an old file's size says nothing."""
    for version in (1, 2):
        begin(updates, trainer, version)
        await outcome(updates, version)
        await updates.commit(version, CommitUpdate())
    spare, staged = tmp_path / "staging" / "spare", tmp_path / "staging" / "v00000003"
    shards = [shard_file(shard.index) for shard in trainer.manifest(3).shards]
    before = {name: (spare / name).stat().st_ino for name in shards}
    with (spare / shards[2]).open("ab") as longer:
        longer.write(b"longer than what comes")
    trainer.cut_after = {1: 70_000}
    begin(updates, trainer, 3)
    assert (await outcome(updates, 3)).pulled_bytes == trainer.manifest(3).num_bytes
    assert [at for version, i, at in trainer.requests if (version, i) == (3, 1)] == [0, 70_000]
    assert {name: (staged / name).stat().st_ino for name in shards} == before
    assert {one.name for one in staged.iterdir()} == {*shards, "manifest.json"}
    for version in (2, 3):  # what is served is nobody's to take
        for name in shards:
            kept = tmp_path / "staging" / f"v{version:08d}" / name
            assert kept.read_bytes() == (published[version] / name).read_bytes()
    await updates.commit(3, CommitUpdate())
    assert {(spare / name).stat().st_ino for name in shards}.isdisjoint(before.values())
    await updates.close()
    assert not (tmp_path / "staging").exists()


async def test_a_process_that_is_started_again_goes_on_at_the_mark(
    trainer: Trainer, published: dict[int, Path], tmp_path: Path
) -> None:
    """Of a file that is written over: after the mark there are bytes of another version."""
    manifest = trainer.manifest(1)
    first = published[1] / shard_file(0)
    half = manifest.shards[0].num_bytes // 2
    target = tmp_path / shard_file(0)
    target.write_bytes(first.read_bytes()[:half] + bytes(manifest.shards[0].num_bytes))
    target.with_suffix(".at").write_bytes(half.to_bytes(8, "little"))
    begin = BeginUpdate(job_id=JOB_ID, version=1, manifest=manifest, sources=[trainer.url])
    stager = Stager(begin, tmp_path, None, deadline_s=20.0)
    await asyncio.to_thread(stager.bring_all)
    assert [at for _, shard, at in trainer.requests if shard == 0] == [half]
    assert target.read_bytes() == first.read_bytes()
