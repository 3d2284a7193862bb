"""A parity run over HTTP against a real actor and engine: choices, walk, or that there is none."""

import json

import httpx
import numpy as np
import pytest
from torch import Tensor

from services.evaluator.parity.live import LivePlan, run_live
from services.evaluator.parity.report import Run
from services.trainer.engine.actor import Actor
from shared.http import HttpClient
from shared.messages import SamplingParams
from shared.models.deepseek_v4.checkpoint import write_release
from shared.parity.judge import MARGINS
from shared.parity.trace import MEDIA_TYPE, TraceRequest
from tests.parity.engines import Case
from tests.parity.live_sides import SamplerSide, TrainerSide, job_of
from tests.parity.mutations import MUTATIONS
from tests.tiny_deepseek_v4 import SMALL, random_tokens, random_weights

pytestmark = pytest.mark.usefixtures("megatron")

ARCH = SMALL.with_format("fp8")
SEQUENCES = random_tokens(ARCH, rows=3, length=120).tolist()


class Services:
    """Both services' routes over what they hold; `hidden` of them do not show inner states."""

    def __init__(self, trainer: TrainerSide, sampler: SamplerSide) -> None:
        self.trainer, self.sampler = trainer, sampler
        self.hidden: set[str] = set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        if path == "/v1/info":
            return httpx.Response(200, json={"policy_version": 0})
        if path == "/v1/trace":
            if host in self.hidden:
                return httpx.Response(404)
            side = self.trainer if host == "trainer" else self.sampler
            traced = await side(TraceRequest.unpack(request.content))
            return httpx.Response(200, content=traced.pack(), headers={"content-type": MEDIA_TYPE})
        asked = json.loads(request.content)
        return httpx.Response(
            200, json={"policy_version": 0, "logprobs": self._score(host, asked["sequences"])}
        )

    def _score(self, host: str, sequences: list[list[int]]) -> list[list[float]]:
        if host == "trainer":
            rows = self.trainer.actor.score([np.array(ids) for ids in sequences])
        else:
            _, rows = self.sampler.engine.score(sequences, 1.0, 0)
        return [row.tolist() for row in rows]

    async def run(self) -> Run:
        plan = LivePlan(
            rollout_url="http://rollout",
            trainer_url="http://trainer",
            sequences=SEQUENCES,
            sampling=SamplingParams(max_response_tokens=1),
            arch=ARCH,
            margin=MARGINS["float32"],
            within_s=30.0,
        )
        transport = httpx.MockTransport(self.answer)
        async with HttpClient(attempts=1, transport=transport) as http:
            return await run_live(http, plan)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(ARCH, seed=11)


@pytest.fixture(scope="module")
def trainer(
    weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory, megatron: None
) -> TrainerSide:
    release = tmp_path_factory.mktemp("policy") / "release"
    write_release(release, ARCH, weights)
    return TrainerSide(Actor(job_of(release, quantisation="full")))


async def test_choices_and_walk_of_honest_services_agree(
    trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    run = await Services(trainer, SamplerSide.of(ARCH, weights)).run()
    assert run.walk is not None
    assert run.walk.first is None
    assert run.argmax_agreement is not None
    assert run.argmax_agreement > 0.98
    assert run.routing_agreement is not None
    assert sorted(run.routing_agreement) == [0, 1, 2, 3, 4]
    assert min(run.routing_agreement.values()) > 0.95


async def test_merge_of_one_service_is_named(
    trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    known = Case(ARCH, weights, Tensor(), Tensor())
    with MUTATIONS["C not transposed"].planted("sampler", known) as (arch, wrong):
        run = await Services(trainer, SamplerSide.of(arch, wrong)).run()
    assert run.walk is not None
    assert run.walk.first == "layer 0 · mHC merge after experts"
    assert run.argmax_agreement is not None
    assert run.argmax_agreement < 0.9


async def test_engine_without_inner_states_is_compared_and_not_walked(
    trainer: TrainerSide, weights: dict[str, Tensor]
) -> None:
    services = Services(trainer, SamplerSide.of(ARCH, weights))
    services.hidden = {"rollout"}
    run = await services.run()
    assert (run.walk, run.argmax_agreement) == (None, None)
    assert "the sampler exposes log-probabilities only" in run.notes[-1]
    assert len(run.sequences) == 3
