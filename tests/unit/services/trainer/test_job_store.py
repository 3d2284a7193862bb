import sqlite3
from pathlib import Path

import pytest

from services.trainer.jobs.store import STORE_FILE, JobStore, KeyReused, WrongState
from shared.job import Job


def make_job(**changes: object) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 4,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 8},
            **changes,
        }
    )


@pytest.fixture
def store(tmp_path: Path):
    store = JobStore(tmp_path / "runs")
    yield store
    store.close()


def test_job_is_there_for_the_next_process(tmp_path: Path, store: JobStore) -> None:
    added, is_new = store.add(make_job(seed=3))
    assert is_new
    other = JobStore(tmp_path / "runs")
    assert other.get(added.job_id) == added
    assert other.get(added.job_id).job == make_job(seed=3)
    other.close()
    with pytest.raises(LookupError, match="there is no job x"):
        store.get("x")


def test_job_of_another_release_fails_and_the_others_run(tmp_path: Path, store: JobStore) -> None:
    old, new = (store.add(make_job())[0].job_id for _ in range(2))
    store.begin(old)
    with sqlite3.connect(tmp_path / "runs" / STORE_FILE) as db:
        db.execute("UPDATE jobs SET document = '{\"gone\": 1}' WHERE job_id = ?", (old,))
    other = JobStore(tmp_path / "runs")
    assert other.next_job().job_id == new
    assert [job.job_id for job in other.all()] == [new]
    with pytest.raises(LookupError):
        other.resume(old)
    other.close()
    state, error = db.execute("SELECT state, error FROM jobs WHERE job_id = ?", (old,)).fetchone()
    assert state == "failed"
    assert "gone" in error
    db.close()


def test_queues_that_share_runs_share_neither_jobs_nor_ids(
    tmp_path: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(tokens))
    first = store.add(make_job())[0].job_id
    (tmp_path / "runs" / first).mkdir()
    other = JobStore(tmp_path / "runs", queue_dir=tmp_path / "queue")
    assert other.next_job() is None
    assert other.add(make_job())[0].job_id == "test-bbbb"
    other.close()


def test_running_job_comes_before_the_queue(store: JobStore) -> None:
    first, second, third = (store.add(make_job())[0].job_id for _ in range(3))
    assert store.next_job().job_id == first
    store.begin(second)
    assert store.next_job().job_id == second
    store.end(second, "finished")
    assert store.next_job().job_id == first
    store.ask(first, "cancel")
    assert store.next_job().job_id == third


def test_key_names_one_document(store: JobStore) -> None:
    first, _ = store.add(make_job(), idempotency_key="k")
    again, is_new = store.add(make_job(), idempotency_key="k")
    assert (again.job_id, is_new) == (first.job_id, False)
    with pytest.raises(KeyReused, match=f"'k' belongs to {first.job_id}"):
        store.add(make_job(steps=5), idempotency_key="k")
    assert len(store.all()) == 1


WISHES = [
    ("queued", "pause", "paused"),
    ("queued", "cancel", "cancelled"),
    ("paused", "cancel", "cancelled"),
    ("paused", "pause", "paused"),
    ("cancelled", "cancel", "cancelled"),
]


@pytest.mark.parametrize(("before", "wish", "after"), WISHES)
def test_job_that_waits_obeys_at_once(store: JobStore, before: str, wish: str, after: str) -> None:
    job_id = store.add(make_job())[0].job_id
    if before != "queued":
        store.end(job_id, before)
    assert store.ask(job_id, wish).state == after


def test_running_job_is_told_of_the_wish(store: JobStore) -> None:
    job_id = store.add(make_job())[0].job_id
    store.begin(job_id)
    assert store.ask(job_id, "pause").state == "running"
    assert store.get(job_id).wish == "pause"
    assert store.resume(job_id).wish is None
    with pytest.raises(WrongState, match="is running; only a paused or failed job can resume"):
        store.resume(job_id)
    store.ask(job_id, "pause")
    assert store.ask(job_id, "cancel").wish == "cancel"
    with pytest.raises(WrongState, match="is being cancelled; it cannot pause any more"):
        store.ask(job_id, "pause")
    with pytest.raises(WrongState, match="is being cancelled; only a paused"):
        store.resume(job_id)
    assert store.get(job_id).wish == "cancel"
    store.end(job_id, "cancelled")
    assert store.get(job_id).wish is None


@pytest.mark.parametrize(
    ("state", "asked"),
    [("finished", "pause"), ("finished", "cancel"), ("failed", "pause"), ("finished", "resume")],
)
def test_ended_job_cannot(store: JobStore, state: str, asked: str) -> None:
    job_id = store.add(make_job())[0].job_id
    store.end(job_id, state)
    with pytest.raises(WrongState, match=f"{job_id} is {state}; only a "):
        store.resume(job_id) if asked == "resume" else store.ask(job_id, asked)


def test_a_pause_that_a_cancel_has_overtaken_is_none(store: JobStore) -> None:
    job_id = store.add(make_job())[0].job_id
    store.begin(job_id)
    store.ask(job_id, "pause")
    store.ask(job_id, "cancel")
    store.end(job_id, "paused", "paused on request")
    assert (store.get(job_id).state, store.get(job_id).wish) == ("cancelled", None)


def test_failed_job_can_be_resumed(store: JobStore) -> None:
    job_id = store.add(make_job())[0].job_id
    store.end(job_id, "failed", "no disk")
    assert store.get(job_id).error == "no disk"
    resumed = store.resume(job_id)
    assert (resumed.state, resumed.error) == ("queued", None)


def test_deaths_without_a_step_are_counted(store: JobStore) -> None:
    job_id = store.add(make_job())[0].job_id
    assert [store.begin(job_id).attempts for _ in range(3)] == [1, 2, 3]
    store.note_progress(job_id)
    assert store.begin(job_id).attempts == 2


def test_an_attempt_that_was_stopped_in_order_is_given_back(store: JobStore) -> None:
    job_id = store.add(make_job())[0].job_id
    for _ in range(3):
        assert store.begin(job_id).attempts == 1
        store.give_back(job_id)
    store.give_back(job_id)
    assert store.get(job_id).attempts == 0
