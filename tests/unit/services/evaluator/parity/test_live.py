"""Two imitated services over an in-memory transport: what a round asks, accepts and refuses."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from services.evaluator.parity import live
from services.evaluator.parity.live import LivePlan, ParityFailed, run_live
from shared.errors import DeadlineExceeded
from shared.http import HttpClient
from shared.messages import SamplingParams
from shared.parity.live_walk import Ask
from shared.parity.trace import StateArray, Traced, TraceRequest
from tests.tiny_deepseek_v4 import SMALL

ROLLOUT, TRAINER = "http://rollout", "http://trainer"
RESPONSE = [7, 8, 9]
Handler = Callable[[str, dict[str, Any]], tuple[int, Any]]


class Services:
    """Answers as both services do; log p of token t is -t / 100, of the trainer a bit less."""

    def __init__(self) -> None:
        self.sampler_version: int | None = 3
        self.trainer_version = 3
        self.shift = 0.5
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.changes: dict[tuple[str, str], Handler] = {}

    def client(self) -> HttpClient:
        return HttpClient(attempts=1, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        key = (request.url.host, request.url.path)
        self.asked.append((*key, body))
        handler = self.changes.get(key, self._usual)
        status, answer = handler(request.url.host, body | {"path": request.url.path})
        return httpx.Response(status, json=answer)

    def _usual(self, host: str, body: dict[str, Any]) -> tuple[int, Any]:
        held = self.sampler_version if host == "rollout" else self.trainer_version
        if body["path"] == "/v1/info":
            return 200, {"policy_version": held}
        if body.get("policy_version") not in (None, held):
            return 409, {"detail": f"version {held} is held"}
        if body["path"] == "/v1/generate":
            samples = [self.completion() for _ in range(body["num_samples"])]
            return 200, {"policy_version": held, "results": [samples] * len(body["prompts"])}
        shift = self.shift if host == "trainer" else 0.0
        logprobs = [[-t / 100 - shift for t in tokens[1:]] for tokens in body["sequences"]]
        return 200, {"policy_version": held, "logprobs": logprobs}

    def completion(self, **changes: Any) -> dict[str, Any]:
        usual = {
            "token_ids": RESPONSE,
            "logprobs": [-t / 100 for t in RESPONSE],
            "text": "x",
            "finish_reason": "stop",
            "version_spans": [{"policy_version": self.sampler_version, "num_tokens": 3}],
        }
        return usual | changes


def plan(**changes: Any) -> LivePlan:
    usual: dict[str, Any] = {
        "rollout_url": ROLLOUT,
        "trainer_url": TRAINER,
        "prompts": [[1, 2], [3, 4, 5]],
        "num_samples": 2,
        "sampling": SamplingParams(max_response_tokens=3, temperature=0.8),
        "within_s": 60.0,
    }
    return LivePlan(**(usual | changes))


async def test_response_tokens_of_one_version_are_compared() -> None:
    services = Services()
    async with services.client() as http:
        run = await run_live(http, plan())
    assert [s.token_ids for s in run.sequences] == [(1, 2, 7, 8, 9)] * 2 + [(3, 4, 5, 7, 8, 9)] * 2
    assert [s.first for s in run.sequences] == [2, 2, 3, 3]
    assert run.sequences[0].ours.tolist() == [-0.07, -0.08, -0.09]
    assert run.sequences[3].theirs == pytest.approx([-0.57, -0.58, -0.59])
    assert run.decoding[0].theirs.tolist() == [-0.07, -0.08, -0.09]
    assert (run.policy_version, run.temperature, run.sampled_by_ours) == (3, 0.8, True)
    scored = [(h, b) for h, path, b in services.asked if path == "/v1/score"]
    assert [(h, b["policy_version"]) for h, b in scored] == [("trainer", None), ("rollout", 3)]
    assert all(b["temperature"] == 0.8 for _, b in scored)


async def test_given_sequences_are_scored_as_they_are() -> None:
    services = Services()
    async with services.client() as http:
        run = await run_live(http, plan(prompts=(), sequences=[[5, 6, 7]]))
    assert not run.sampled_by_ours
    assert run.decoding == []
    assert run.sequences[0].first == 1
    assert run.sequences[0].ours.tolist() == [-0.06, -0.07]
    assert not any(path == "/v1/generate" for _, path, _ in services.asked)


async def test_trainer_that_moved_on_is_followed() -> None:
    services = Services()
    services.trainer_version = 4  # trained, and published while the trainer scores

    def publish(host: str, body: dict[str, Any]) -> tuple[int, Any]:
        answers = sum(path == "/v1/info" for _, path, _ in services.asked)
        services.sampler_version = 4 if answers > 3 else 3
        return 200, {"policy_version": services.sampler_version}

    services.changes["rollout", "/v1/info"] = publish
    async with services.client() as http:
        run = await run_live(http, plan())
    assert (run.policy_version, run.sampled_by_ours, run.decoding) == (4, False, [])
    assert run.notes == ["the tokens were sampled by version 3"]
    assert run.sequences[0].ours.tolist() == [-0.07, -0.08, -0.09]
    assert sum(path == "/v1/generate" for _, path, _ in services.asked) == 1


async def test_version_that_was_missed_is_scored_again() -> None:
    services = Services()

    def too_late(host: str, body: dict[str, Any]) -> tuple[int, Any]:
        services.changes.clear()
        services.sampler_version = services.trainer_version = 5
        return 409, {"detail": "version 5 is held"}

    services.changes["rollout", "/v1/score"] = too_late
    async with services.client() as http:
        assert (await run_live(http, plan())).policy_version == 5


async def test_samples_of_two_versions_are_not_used() -> None:
    services = Services()

    def mixed(host: str, body: dict[str, Any]) -> tuple[int, Any]:
        services.changes.clear()
        spans = [
            {"policy_version": 3, "num_tokens": 1},
            {"policy_version": 4, "num_tokens": 2},
        ]
        samples = [services.completion(version_spans=spans)] * body["num_samples"]
        return 200, {"policy_version": 3, "results": [samples] * 2}

    services.changes["rollout", "/v1/generate"] = mixed
    async with services.client() as http:
        run = await run_live(http, plan())
    assert sum(path == "/v1/generate" for _, path, _ in services.asked) == 2
    assert run.policy_version == 3


async def test_version_that_is_gone_is_not_waited_for() -> None:
    """Of prompts and of given tokens; also when it goes before inner states were asked for."""
    services = Services()
    for asked in ({}, {"prompts": (), "sequences": [[5, 6]]}):
        async with services.client() as http:
            with pytest.raises(ParityFailed, match="serves version 3 already, not 2"):
                await run_live(http, plan(policy_version=2, within_s=600, **asked))

    def moves_on(host: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = services._usual(host, body)
        services.sampler_version = services.trainer_version = 4
        return answer

    services.changes["rollout", "/v1/score"] = moves_on
    async with services.client() as http:
        run = await run_live(http, plan(policy_version=3, arch=SMALL, within_s=600))
    assert run.policy_version == 3
    assert run.sequences[0].ours.tolist() == [-0.07, -0.08, -0.09]
    assert "serves version 4 already, not 3" in run.notes[-1]


async def test_deadline_names_what_was_in_the_way() -> None:
    services = Services()
    services.trainer_version = 9
    async with services.client() as http:
        with pytest.raises(DeadlineExceeded, match="the trainer holds version 9, the sampler 3"):
            await run_live(http, plan(within_s=1.0))
    services.sampler_version = None
    async with services.client() as http:
        with pytest.raises(DeadlineExceeded, match="the sampler has no weights yet"):
            await run_live(http, plan(within_s=1.0))


async def test_null_is_not_finite_and_empty_completions_are_left_out() -> None:
    services = Services()

    def odd(host: str, body: dict[str, Any]) -> tuple[int, Any]:
        empty = services.completion(token_ids=[], logprobs=[], version_spans=[])
        hole = services.completion(logprobs=[-0.07, None, -0.09])
        return 200, {"policy_version": 3, "results": [[empty, hole]] * 2}

    services.changes["rollout", "/v1/generate"] = odd
    async with services.client() as http:
        run = await run_live(http, plan())
    assert len(run.sequences) == 2
    assert [str(v) for v in run.sequences[0].ours] == ["-0.07", "nan", "-0.09"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((422, {"detail": "token 900 is unknown"}), "the trainer refuses.*token 900"),
        ((200, {"policy_version": 3, "logprobs": [[0.0]] * 4}), "do not fit the sequences"),
        ((200, {"version": 3}), "cannot be read"),
    ],
)
async def test_what_cannot_become_right_fails_at_once(
    answer: tuple[int, Any], message: str
) -> None:
    services = Services()
    services.changes["trainer", "/v1/score"] = lambda host, body: answer
    async with services.client() as http:
        with pytest.raises(ParityFailed, match=message):
            await run_live(http, plan(within_s=30.0))


async def test_nothing_sampled_is_said() -> None:
    services = Services()
    nothing = services.completion(token_ids=[], logprobs=[], version_spans=[])
    answer = {"policy_version": 3, "results": [[nothing] * 2] * 2}
    services.changes["rollout", "/v1/generate"] = lambda host, body: (200, answer)
    async with services.client() as http:
        with pytest.raises(ParityFailed, match="every completion is empty"):
            await run_live(http, plan())


@pytest.mark.parametrize(
    ("path", "answer", "text"),
    [
        ("/v1/generate", [[{}, {}]], "1 results of 2 prompts"),
        ("/v1/generate", [[{}, {}]] * 3, "3 results of 2 prompts"),
        ("/v1/generate", [[{}]] * 2, "prompt 0 has 1 samples, not 2"),
        ("/v1/generate", [[{"logprobs": [-0.1]}] * 2] * 2, "has 1 log-probabilities of 3 tokens"),
        ("/v1/info", "abc", "serves version 'abc': no number"),
        ("/v1/info", [1], r"serves version \[1\]: no number"),
    ],
)
async def test_wrong_answers_fail_the_run_by_name(path: str, answer: Any, text: str) -> None:
    services = Services()
    body: dict[str, Any] = {"policy_version": answer}
    if path == "/v1/generate":
        results = [[services.completion(**one) for one in samples] for samples in answer]
        body = {"policy_version": 3, "results": results}
    services.changes["rollout", path] = lambda host, asked: (200, body)
    async with services.client() as http:
        with pytest.raises(ParityFailed, match=text):
            await run_live(http, plan())


def states_of(num_experts: int, *, with_logits: bool = True, num_rows: int = 5) -> Ask:
    async def answer(request: TraceRequest) -> Traced:
        routers = np.ones((num_rows, num_experts), np.float32)
        states = {f"layers.{layer}.router": StateArray.of(routers) for layer in range(5)}
        if with_logits:
            states["logits"] = StateArray.of(np.ones((num_rows, 512), np.float32))
        return Traced(policy_version=3, states=[states] * len(request.sequences))

    return answer


@pytest.mark.parametrize(
    "wrong",
    [states_of(16), states_of(8, with_logits=False), states_of(8, num_rows=2)],
    ids=["other experts", "no logits", "fewer rows"],
)
async def test_states_that_do_not_fit_fail_the_run(
    wrong: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services()
    sides = {"trainer": states_of(8), "sampler": wrong}

    async def traced(asking: object, url: str, who: str, request: TraceRequest) -> Traced:
        return await sides[who](request)

    monkeypatch.setattr(live._Asking, "_trace", traced)
    async with services.client() as http:
        with pytest.raises(ParityFailed, match="states of the two sides do not fit together"):
            await run_live(http, plan(arch=SMALL))
