from pathlib import Path

import numpy as np
import pytest

from services.rollout.config import RolloutConfig
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.serving import engine_spec
from services.rollout.worker import group_share, text_of, to_group
from shared.job import Job
from shared.messages import PromptGroup, SamplingParams
from shared.tokenizer import CheckpointTokenizer
from tests.tiny_deepseek_v4 import DEMO

TOKENIZER = Path("assets/tiny-dsv4")


def make_job(**sections: dict[str, object]) -> Job:
    document: dict[str, dict[str, object]] = {
        "model": {"rollout_checkpoint": "/nowhere"},
        "data": {"path": "/nowhere"},
        "sampling": {
            "groups_per_step": 16,
            "samples_per_prompt": 8,
            "context_length": 64,
            "max_response_tokens": 24,
        },
    }
    for name, fields in sections.items():
        document[name] = document.get(name, {}) | fields
    return Job.model_validate({"name": "test", "steps": 1, **document})


@pytest.mark.parametrize(
    ("sections", "servers", "share"),
    [
        ({}, 1, 16),  # the engine's 128 completions
        ({}, 2, 8),  # half of the 16 groups that may be open
        ({}, 3, 6),
        ({}, 40, 1),
        ({"algorithm": {"max_lag": 3}}, 2, 16),  # 64 groups may be open: the engine is the bound
        ({"rollout": {"max_running_requests": 3}}, 1, 1),
        ({"sampling": {"oversampling": 1.5}}, 2, 12),
    ],
)
def test_share_fills_the_engine_and_leaves_the_others_theirs(
    sections: dict[str, dict[str, object]], servers: int, share: int
) -> None:
    assert group_share(make_job(**sections), servers) == share


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("max_lag", [0, 1, 8])
@pytest.mark.parametrize("running", [1, 8, 40, 128])
def test_no_server_idles_while_prompts_wait(servers: int, max_lag: int, running: int) -> None:
    """If all have their share and prompts still wait, then every engine is full."""
    job = make_job(algorithm={"max_lag": max_lag}, rollout={"max_running_requests": running})
    share = group_share(job, servers)
    waiting = 16 * (max_lag + 1) - share * servers
    assert waiting <= 0 or share * 8 >= running


def completion(ids: list[int], reason: str = "stop") -> Completion:
    spans = [(4, len(ids))] if ids else []
    return Completion(np.array(ids, np.int32), -np.ones(len(ids), np.float32), spans, reason)  # type: ignore[arg-type]


def test_text_leaves_the_stop_token_out_and_the_ids_keep_it() -> None:
    tokenizer = CheckpointTokenizer.load(TOKENIZER)
    ids = tokenizer.encode("12")
    (stop,) = tokenizer.stop_token_ids
    assert text_of(completion([*ids, stop]), tokenizer) == "12"
    assert text_of(completion(ids, "length"), tokenizer) == "12"
    prompt = PromptGroup(
        job_id="j",
        group_id="j.g000001",
        draw=1,
        prompt_token_ids=[5],
        gold="12",
        grader="arithmetic",
        num_samples=2,
        sampling=SamplingParams(max_response_tokens=4),
        seed=0,
        min_policy_version=4,
    )
    done = {0: completion([*ids, stop]), 1: completion([stop])}
    group = to_group(prompt, done, tokenizer, replica="r", sampling_s=0.1)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["j.g000001.0", "j.g000001.1"]
    assert [rollout.text for rollout in group.rollouts] == ["12", ""]
    assert group.rollouts[0].response_token_ids.tolist() == [*ids, stop]
    assert group.rollouts[1].oldest_version == 4


def test_requests_survive_the_channel() -> None:
    partial = {3: completion([7, 8], "abort")}
    request = GroupRequest(
        "r1",
        np.array([1, 2, 3], np.int32),
        [0, 3],
        SamplingParams(max_response_tokens=4, stop_token_ids=[1]),
        seed=-5,
        prompt_index=2,
        policy_version=9,
        partial=partial,
    )
    again = GroupRequest.from_payload(request.to_payload())
    assert again.to_payload() == request.to_payload()
    assert again.partial[3].token_ids.tolist() == [7, 8]
    assert again.partial[3].version_spans == [(4, 2)]


def test_unquantised_weights_make_an_fp32_engine() -> None:
    arch = DEMO.with_format("fp8")
    assert engine_spec(make_job(), arch, RolloutConfig()).arch.weight_format == "fp8"
    spec = engine_spec(make_job(rollout={"weights": "float32"}), arch, RolloutConfig())
    assert spec.arch.weight_format == "fp32"
    assert EngineSpec.from_payload(spec.to_payload()) == spec
