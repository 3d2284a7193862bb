"""The engine child of an SGLang server says what was asked of it, and what it runs with."""

from pathlib import Path

import numpy as np

from services.rollout.engine.engine import running_engine
from services.rollout.engine.requests import EngineSpec, GroupRequest
from services.rollout.engine.sglang.spec import ServerSpec
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.spans import Span
from shared.weights.protocol import CommitUpdate, Probe, ProbeSequence
from tests.engine_contract import CHECKPOINT, PROBE, reference_logprobs, variant
from tests.integration.fake_sglang import FakeServer, serving
from tests.integration.rollout_world import write_version


async def test_requests_and_updates_are_in_its_spans(tmp_path: Path) -> None:
    stored, fake = variant(0), FakeServer()
    manifest = write_version(tmp_path / "v0", stored, 0)
    (tmp_path / "v0" / "manifest.json").write_text(manifest.model_dump_json())
    sequences = [
        ProbeSequence(token_ids=ids, logprobs=reference_logprobs(stored, ids).tolist())
        for ids in PROBE
    ]
    commit = CommitUpdate(probe=Probe(sequences=sequences, max_mean_abs_delta=1e-3))
    request = GroupRequest(
        "r", np.array(PROBE[0], np.int32), [0, 1], SamplingParams(max_response_tokens=4), seed=1
    )
    async with serving(fake):
        server = ServerSpec(str(CHECKPOINT), url=fake.url)
        spec = EngineSpec(Architecture.load(CHECKPOINT), 8, 64, False, 1, server=server)
        async with running_engine(spec) as engine:
            await engine.spans(100)
            await engine.activate(tmp_path / "v0", commit, timeout_s=30)
            await engine.generate(request, timeout_s=30)
            told = await engine.spans(0)
            await engine.generate(request, timeout_s=30)
            silent = await engine.spans(0)
            environment = await engine.environment()
    found = {one.name: one for one in (Span(*span) for span in told["spans"])}
    assert found.keys() == {"activate", "generate"}
    assert found["activate"].facts == {"policy_version": 0}
    assert found["activate"].end_ns <= found["generate"].begin_ns
    assert (silent["spans"], silent["pid"]) == ([], engine.pid)
    assert environment["packages"]["torch"]
    assert environment["server"]["version"]
