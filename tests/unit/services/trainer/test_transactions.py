import asyncio
import json
import time
from collections.abc import Callable

import httpx
import pytest

from services.trainer.servers import MAX_REFUSALS, Server
from services.trainer.transactions import Transaction, UpdateFailed, ValuesDiffer, is_refusal
from shared.errors import DeadlineExceeded, HttpFailed, WeightsCorrupt
from shared.http import HttpClient
from shared.registry import Replica
from shared.weights.manifest import Manifest
from shared.weights.protocol import BeginUpdate, CommitUpdate

BEGIN = BeginUpdate(
    job_id="j",
    version=3,
    manifest=Manifest(job_id="j", policy_version=3, shards=[], tensors=[]),
    sources=["http://trainer"],
)
RESULT = {
    **dict.fromkeys(("pause_s", "load_s", "restore_s", "probe_s", "resume_s"), 0.1),
    "effective_checksum": "0" * 32,
}


def transaction(answer: Callable[[httpx.Request], tuple[int, object]], deadline_s: float = 5.0):
    def handle(request: httpx.Request) -> httpx.Response:
        status, body = answer(request)
        return httpx.Response(status, json=body)

    http = HttpClient(attempts=1, transport=httpx.MockTransport(handle))
    return Transaction(http, server_url="http://server", deadline_s=deadline_s)


def status(state: str, **fields: object) -> dict:
    return {"version": 3, "state": state, **fields}


async def test_staging_is_polled_until_it_is_done() -> None:
    states = iter(["staging", "staging", "staged"])
    seen = []

    def answer(request: httpx.Request) -> tuple[int, object]:
        seen.append((request.method, request.url.path))
        if request.method == "POST":
            assert json.loads(request.content)["sources"] == ["http://trainer"]
        return 200, status(next(states))

    await transaction(answer).stage(BEGIN)
    assert seen == [
        ("POST", "/v1/weights/updates"),
        ("GET", "/v1/weights/updates/3"),
        ("GET", "/v1/weights/updates/3"),
    ]


async def test_staging_that_fails_says_why() -> None:
    """And whether that speaks against the version."""
    for is_wrong in (True, False):
        told = status("failed", error="checksum of w", is_wrong=is_wrong)
        update = transaction(lambda _, told=told: (200, told))
        with pytest.raises(UpdateFailed, match="staging failed: checksum of w") as failed:
            await update.stage(BEGIN)
        assert is_refusal(failed.value) == is_wrong


async def test_staging_that_does_not_end_is_given_up_with_its_progress() -> None:
    answer = status("staging", staged_bytes=5, total_bytes=9)
    update = transaction(lambda _: (200, answer), deadline_s=0.1)
    with pytest.raises(DeadlineExceeded, match=r"stage version 3 .5 of 9 bytes."):
        await update.stage(BEGIN)


async def test_commit_of_another_version_is_none() -> None:
    update = transaction(lambda _: (200, RESULT | {"version": 2}))
    with pytest.raises(UpdateFailed, match="commit of 3 was answered for version 2") as failed:
        await update.commit(3, CommitUpdate())
    assert not is_refusal(failed.value)
    right = transaction(lambda _: (200, RESULT | {"version": 3}))
    assert (await right.commit(3, CommitUpdate())).pause_s == 0.1


@pytest.mark.parametrize(
    "body",
    [
        [],
        "text",
        None,
        {"version": "x"},
        status("staged", pulled_bytes=-1),
        status("staged", rebuilt_shards=2**63),
    ],
)
async def test_answer_that_means_nothing_is_a_failed_update(body: object) -> None:
    with pytest.raises(UpdateFailed, match="not an answer of a rollout server"):
        await transaction(lambda _: (200, body)).stage(BEGIN)


@pytest.mark.parametrize(
    ("info", "serves"),
    [
        ({"policy_version": 3, "job_id": "j"}, True),
        ({"policy_version": 3, "job_id": "other"}, False),
        ({"policy_version": 2, "job_id": "j"}, False),
        ({"policy_version": None}, False),
    ],
)
async def test_server_may_serve_the_version_already(info: dict, serves: bool) -> None:
    assert await transaction(lambda _: (200, info)).serves_already("j", 3) is serves


async def test_abort_that_is_not_heard_is_no_error() -> None:
    await transaction(lambda _: (404, {"detail": "no such update"})).abort(3)


def test_only_what_a_server_looked_at_is_refused() -> None:
    assert is_refusal(UpdateFailed("staging failed"))
    assert is_refusal(HttpFailed("POST", "u", 500, "the probe failed"))
    assert is_refusal(WeightsCorrupt("version 3 cannot be rebuilt"))
    assert not is_refusal(HttpFailed("POST", "u", 409, "another is in flight"))
    assert not is_refusal(HttpFailed("POST", "u", None, "ConnectError"))
    assert not is_refusal(DeadlineExceeded("x", 1.0))


def server(**traits: object) -> Server:
    return Server(Replica(service="rollout", name="r", url="http://r", pid=1, job_id="j", **traits))


def test_quarantine_grows_and_ends_with_a_commit() -> None:
    one = server()
    waits = [one.note_failed(3, "x", is_refusal=False) for _ in range(1100)]  # nine hours
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 30.0
    assert one.is_quarantined
    one.note_committed(3)
    assert one.note_failed(4, "x", is_refusal=False) == 0.5


def test_a_server_that_departed_waits_longer_until_somebody_confirms_it() -> None:
    one = server()
    one.has_departed = True
    assert one.note_failed(3, "x", is_refusal=True) == 0.5
    one.note_committed(4)
    assert one.note_failed(4, "x", is_refusal=True) == 1.0
    assert not one.serves(4)
    one.has_departed = False
    one.note_committed(5)
    assert one.note_failed(6, "x", is_refusal=True) == 0.5
    assert one.serves(5)


def test_the_first_word_of_what_is_not_loaded_anew_counts() -> None:
    one = server()
    assert one.note_said(3, "a") == "a"
    assert one.note_said(3, "b") == "a"
    assert one.note_said(4, "b") == "b"
    one.said = None  # it loads
    assert one.note_said(4, "c") == "c"


def test_refusals_are_counted_by_version() -> None:
    one = server()
    for _ in range(MAX_REFUSALS - 1):
        one.note_failed(3, "x", is_refusal=True)
    one.note_failed(3, "x", is_refusal=False)
    assert not one.has_refused(3)
    one.note_failed(3, "x", is_refusal=True)
    assert one.has_refused(3)
    one.note_failed(4, "x", is_refusal=True)
    assert not one.has_refused(4)
    one.note_failed(4, "x", is_refusal=True)
    one.note_failed(4, "x", is_refusal=True)
    assert one.has_refused(4)
    one.forget_refusals()
    assert not one.has_refused(4)


def test_registry_is_not_believed_right_after_a_commit() -> None:
    one = server()
    one.look_at(one.record.model_copy(update={"policy_version": 2}))
    assert one.version == 2
    assert not one.serves(2)  # nobody has compared what it computes with
    one.note_committed(3)
    one.look_at(one.record.model_copy(update={"policy_version": 2}))
    assert one.version == 3
    assert one.serves(3)
    assert one.describe(held_at=3) == "serving 3, held at 3"
    assert not one.is_same(one.record.model_copy(update={"pid": 2}))


def late(answers: list[tuple[int, object] | None]) -> Transaction:
    """Answers in their order; None is one that does not come in time."""

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        if answer is None:
            raise httpx.ReadTimeout("")
        return httpx.Response(answer[0], json=answer[1])

    http = HttpClient(attempts=1, transport=httpx.MockTransport(handle))
    return Transaction(http, server_url="http://server", deadline_s=7.0)


async def test_a_commit_whose_answer_is_lost_is_asked_for_again() -> None:
    right = (200, RESULT | {"version": 3})
    assert (await late([None, right]).commit(3, CommitUpdate())).version == 3
    with pytest.raises(HttpFailed, match=r"500: .*refused"):
        await late([None, (500, "refused")]).commit(3, CommitUpdate())
    with pytest.raises(DeadlineExceeded, match=r"waited 0 s for http://server to commit version"):
        await late([None, None]).commit(3, CommitUpdate())
    refused: list[tuple[int, object] | None] = [(500, "the probe"), right]
    with pytest.raises(HttpFailed, match="500"):
        await late(refused).commit(3, CommitUpdate())
    assert refused == [right]  # an answer is an answer


async def test_a_version_that_is_refused_for_its_values_alone_is_told_apart() -> None:
    told = (412, {"detail": "effective checksum 0, expected was 1"})
    with pytest.raises(ValuesDiffer, match=r"412: .*expected was 1") as differs:
        await late([told]).commit(3, CommitUpdate(effective_checksum="1" * 32))
    assert (differs.value.said, differs.value.expected) == (None, "1" * 32)
    assert is_refusal(differs.value)
    with pytest.raises(HttpFailed, match="412"):  # of what was expected of nobody
        await late([told]).commit(3, CommitUpdate())


async def test_staging_and_commit_have_one_deadline() -> None:
    """It counts while the server is waited for, and the error says what for and how long."""
    began_s = time.monotonic()

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/commit"):
            await asyncio.sleep(30)
        is_staged = time.monotonic() - began_s > 0.7
        return httpx.Response(200, json=status("staged" if is_staged else "staging"))

    http = HttpClient(attempts=1, transport=httpx.MockTransport(handle))
    update = Transaction(http, server_url="http://server", deadline_s=1.0)
    await update.stage(BEGIN)
    await asyncio.sleep(0.5)  # as for the turn of another
    with pytest.raises(DeadlineExceeded) as exceeded:
        await update.commit(3, CommitUpdate())
    assert 0 < exceeded.value.after_s <= 0.4
    assert "server to commit version 3; of its 1 s for an update 0." in str(exceeded.value)


@pytest.mark.parametrize("answer", [None, (504, "waited 7 s for the child to answer rehearse")])
async def test_a_rehearsal_that_runs_out_of_time_says_so(
    answer: tuple[int, object] | None,
) -> None:
    with pytest.raises(DeadlineExceeded, match="waited 0 s for http://server to rehearse version"):
        await late([answer]).rehearse(3, CommitUpdate())
