"""Sums of graders, the penalty for length, repetitions, and graders that are somewhere else."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from services.reward.grading import Asked, Grading
from services.reward.length import overlong_penalty
from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from services.reward.remote import RemoteConfig, RemoteGrader
from shared.http import HttpClient
from shared.job_reward import OverlongSection, RewardPart, RewardSection
from shared.messages import GraderError, Outcome, Score, Timeout, Unparseable

URL = "http://grader/v1/grade"


class FakePool:
    """Says of each response what it says itself: a number, or a kind of outcome."""

    grader_names = ("format", "math", "mine")

    def __init__(self) -> None:
        self.calls: list[list[Check]] = []
        self.fails_once: set[str] = set()

    async def grade(self, checks: list[Check]) -> list[Outcome]:
        self.calls.append(checks)
        return [self._outcome(check) for check in checks]

    def _outcome(self, check: Check) -> Outcome:
        if check.response in self.fails_once:
            self.fails_once.discard(check.response)
            return Timeout(after_s=1.0)
        if check.response == "unparseable":
            return Unparseable(reason="no answer")
        if check.response == "error":
            return GraderError(reason="broken")
        return Score(value=1.0 if check.grader == "format" else float(check.response))


@pytest_asyncio.fixture
async def grading() -> AsyncIterator[Grading]:
    grading = Grading(cast(GradingPool, FakePool()), {})
    yield grading
    await grading.close()


def asked(response: str, **more: Any) -> Asked:
    return Asked(grader="math", response=response, gold="1", timeout_s=1.0, **more)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (99999, -1.0)],
)
def test_overlong_penalty_is_that_of_dapo(num_tokens: int, penalty: float) -> None:
    """Its published setting: 16,384 tokens and a buffer of 4,096."""
    found = overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096)
    assert found == pytest.approx(penalty)


def test_overlong_penalty_refuses_a_buffer_beyond_its_maximum() -> None:
    with pytest.raises(ValueError, match="buffer_tokens 9"):
        overlong_penalty(1, max_tokens=8, buffer_tokens=9)
    with pytest.raises(ValidationError, match="buffer_tokens 9 exceeds"):
        OverlongSection(max_tokens=8, buffer_tokens=9)


async def test_parts_are_added_by_weight(grading: Grading) -> None:
    parts = (RewardPart(grader="format", weight=0.2),)
    overlong = OverlongSection(max_tokens=10, buffer_tokens=4, weight=0.5)
    outcomes = await grading.grade(
        [asked("1", parts=parts, overlong=overlong, num_tokens=8), asked("0", parts=parts)]
    )
    assert [cast(Score, one).value for one in outcomes] == pytest.approx([1 + 0.2 - 0.25, 0.2])
    assert [cast(Score, one).correctness for one in outcomes] == [1.0, 0.0]
    assert "0.2 x format 1" in cast(Score, outcomes[0]).reason
    assert "0.5 x overlong -0.5" in cast(Score, outcomes[0]).reason


async def test_what_is_not_shaped_is_worth_its_value(grading: Grading) -> None:
    (outcome,) = await grading.grade([asked("0.5")])
    assert cast(Score, outcome).unshaped is None
    assert cast(Score, outcome).correctness == 0.5
    with pytest.raises(ValidationError, match="nan is not finite"):
        Score(value=1.0, unshaped=float("nan"))


async def test_a_sum_of_what_was_not_scored_is_no_score(grading: Grading) -> None:
    parts = (RewardPart(grader="format"),)
    outcomes = await grading.grade([asked("unparseable", parts=parts), asked("error", parts=parts)])
    assert [one.kind for one in outcomes] == ["unparseable", "error"]


async def test_a_sum_beyond_the_bound_of_a_score_is_an_error(grading: Grading) -> None:
    parts = (RewardPart(grader="format", weight=1e300),)
    outcomes = await grading.grade([asked("1", parts=parts), asked("-1e6"), asked("1")])
    assert [one.kind for one in outcomes] == ["error", "score", "score"]
    reason = cast(GraderError, outcomes[0]).reason
    assert "value 1e+300 is beyond the bound of a score, 1e+06 either way" in reason


async def test_what_fails_is_repeated_as_often_as_asked_and_the_rest_is_not(
    grading: Grading,
) -> None:
    pool = cast(FakePool, grading.pool)
    pool.fails_once = {"1"}
    items = [asked("1"), asked("0"), asked("error"), asked("unparseable")]
    outcomes = await grading.grade(items, retries=2)
    assert [one.kind for one in outcomes] == ["score", "score", "error", "unparseable"]
    assert [len(call) for call in pool.calls] == [4, 2, 1]
    await grading.grade(items, retries=2, retried=["timeout"])
    assert [len(call) for call in pool.calls[3:]] == [4]


async def test_plug_ins_go_by_their_own_name_and_unknown_graders_are_named() -> None:
    grading = Grading(cast(GradingPool, FakePool()), {"judge": RemoteConfig(url=URL)})
    plugged = Asked(grader="plugin.mine", response="1", gold="", timeout_s=1.0)
    assert grading.unknown(plugged) is None
    assert (await grading.grade([plugged]))[0].kind == "score"
    assert cast(FakePool, grading.pool).calls[0][0].grader == "mine"
    assert grading.unknown(asked("1", parts=(RewardPart(grader="remote.other"),))) == "remote.other"
    assert "remote.judge" in grading.names
    await grading.close()


@pytest.mark.parametrize("name", ["mth", "plugin.", "plugin.A", "remote.x/y", "plugin.a.b", ""])
def test_a_job_names_graders_that_can_exist(name: str) -> None:
    with pytest.raises(ValidationError, match="no grader"):
        RewardSection(grader=name)


class FakeServer:
    """Answers requests of a remote grader as told, one after the other."""

    def __init__(self, *answers: Callable[[httpx.Request], httpx.Response]) -> None:
        self.answers = list(answers)
        self.num_requests = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request)


def right(request: httpx.Request) -> httpx.Response:
    items = json.loads(request.content)["items"]
    outcomes = [{"kind": "score", "value": float(one["response"])} for one in items]
    return httpx.Response(200, json={"outcomes": outcomes})


def broken(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503)


def remote(server: FakeServer, **config: Any) -> RemoteGrader:
    grader = RemoteGrader("judge", RemoteConfig(url=URL, **config))
    transport = httpx.MockTransport(server)
    grader._http = HttpClient(attempts=config.get("attempts", 3), transport=transport)
    return grader


async def test_remote_graders_are_asked_in_parts_and_answer_in_order() -> None:
    server = FakeServer(right)
    grader = remote(server, max_items=2)
    outcomes = await grader.grade([(str(i), "") for i in range(5)])
    assert [cast(Score, one).value for one in outcomes] == [0, 1, 2, 3, 4]
    assert server.num_requests == 3


async def test_a_remote_failure_is_repeated_and_then_an_error_never_a_zero() -> None:
    server = FakeServer(broken, right)
    assert (await remote(server).grade([("1", "")]))[0] == Score(value=1.0)
    assert server.num_requests == 2
    (outcome,) = await remote(FakeServer(broken), attempts=2).grade([("1", "")])
    assert isinstance(outcome, GraderError)
    assert "remote grader judge" in outcome.reason


@pytest.mark.parametrize(
    "answer",
    [{"outcomes": []}, {"outcomes": [{"kind": "score", "value": "high"}]}, {}, {"scores": [1]}],
)
async def test_a_remote_answer_that_cannot_be_read_is_an_error(answer: dict[str, Any]) -> None:
    server = FakeServer(lambda _: httpx.Response(200, json=answer))
    (outcome,) = await remote(server).grade([("1", "")])
    assert isinstance(outcome, GraderError)


@pytest.mark.parametrize(
    ("body", "reason"),
    [("[" * 200_000, "nested too deeply"), ("<html>", "Expecting value"), ("null", "no list of")],
)
async def test_a_remote_answer_that_is_no_json_of_ours_is_an_error(body: str, reason: str) -> None:
    headers = {"content-type": "application/json"}
    server = FakeServer(lambda _: httpx.Response(200, content=body, headers=headers))
    (outcome,) = await remote(server).grade([("1", "")])
    assert isinstance(outcome, GraderError)
    assert reason in outcome.reason


async def test_a_remote_score_beyond_the_bound_costs_its_own_response_only() -> None:
    low, huge, high = await remote(FakeServer(right)).grade(
        [("-1e6", ""), ("1.7e308", ""), ("1", "")]
    )
    assert isinstance(huge, GraderError)
    assert "value 1.7e+308 is beyond the bound of a score, 1e+06 either way" in huge.reason
    assert (low, high) == (Score(value=-1e6), Score(value=1.0))


async def test_a_remote_grader_that_keeps_failing_is_cut_off_and_tried_again() -> None:
    server = FakeServer(broken)
    grader = remote(server, attempts=1, max_failures=2, open_s=1.0)
    for _ in range(2):
        await grader.grade([("1", "")])
    (outcome,) = await grader.grade([("1", "")])
    assert isinstance(outcome, GraderError)
    assert "is not asked for another" in outcome.reason
    assert server.num_requests == 2
    server.answers = [right]
    deadline_s = time.monotonic() + 60
    while (await grader.grade([("1", "")]))[0].kind != "score":
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
    assert server.num_requests == 3  # one trial was enough


async def test_a_remote_grader_has_a_deadline() -> None:
    class Silent(FakeServer):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(60)
            raise AssertionError

    (outcome,) = await remote(Silent(right), deadline_s=0.1).grade([("1", "")])
    assert isinstance(outcome, GraderError)
    assert "no answer within 0.1 s" in outcome.reason
