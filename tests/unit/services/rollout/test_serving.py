"""What a service makes of completions that the engine cut short."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.serving import Serving
from shared.messages import SamplingParams


class InterruptingEngine:
    """Cuts sample 1 short the first time, after two tokens of version 0; then version 1 serves."""

    def __init__(self) -> None:
        self.asked: list[GroupRequest] = []
        self.died = SimpleNamespace(is_set=lambda: False)

    def new_request_id(self) -> str:
        return f"r{len(self.asked)}"

    async def generate(self, request: GroupRequest, *, timeout_s: float) -> list[Completion]:
        self.asked.append(request)
        return [self._one(index, request) for index in request.samples]

    def _one(self, index: int, request: GroupRequest) -> Completion:
        if len(self.asked) == 1:
            return completion([(0, 2)], "abort" if index == 1 else "stop")
        begun = request.partial.get(index)
        return completion([*(begun.version_spans if begun else []), (1, 3)], "stop")


def completion(spans: list[tuple[int, int]], reason: Any) -> Completion:
    length = sum(num for _, num in spans)
    return Completion(np.arange(length), np.zeros(length, np.float32), spans, reason)


def serving(interrupted: str) -> tuple[Serving, InterruptingEngine]:
    engine = InterruptingEngine()
    job = SimpleNamespace(sampling=SimpleNamespace(interrupted=interrupted))
    fakes: dict[str, Any] = {"job": job, "engine": engine, "tokenizer": None, "updates": None}
    return Serving(job_id="j", trainer_url="", **fakes), engine


REQUEST = GroupRequest(
    "", np.array([1, 2]), [0, 1, 2], SamplingParams(max_response_tokens=8), seed=1
)


async def test_an_interrupted_completion_goes_on_under_the_new_version() -> None:
    served, engine = serving("resume")
    done = await served.sample(REQUEST, timeout_s=60)
    assert done[1].version_spans == [(0, 2), (1, 3)]
    assert [request.samples for request in engine.asked] == [[0, 1, 2], [1]]


async def test_or_begins_again_if_the_job_says_so() -> None:
    served, engine = serving("discard")
    done = await served.sample(REQUEST, timeout_s=60)
    assert done[1].version_spans == [(1, 3)]
    assert engine.asked[1].partial == {}


async def test_what_is_not_needed_is_not_asked_again() -> None:
    served, engine = serving("resume")
    done = await served.sample(replace(REQUEST, enough=2), timeout_s=60)
    assert list(done) == [0, 2]
    assert len(engine.asked) == 1
