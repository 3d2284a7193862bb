"""A recorded run is read as it was graded, and only what is judged otherwise is shown."""

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.cli.regrade import differences, read_run, requests, with_changes
from services.evaluator.sample_file import SampleFile
from services.reward.config import LimitsConfig
from services.trainer.recording import RECORDING_FILE, Recording
from shared.errors import ConfigInvalid
from shared.job import Job
from shared.messages import (
    GraderError,
    Outcome,
    PromptGroup,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    ScoredGroup,
    Unparseable,
    VersionSpan,
)
from tests.unit.services.evaluator.test_samples import keep, make_plan, make_result

JOB = Job.model_validate(
    {
        "name": "demo",
        "steps": 1,
        "model": {"rollout_checkpoint": "nowhere"},
        "data": {"path": "nowhere.jsonl"},
        "sampling": {"context_length": 64, "max_response_tokens": 16},
        "reward": {
            "timeout_s": 2.5,
            "parts": [{"grader": "format", "weight": 0.5}],
            "overlong": {"max_tokens": 16, "buffer_tokens": 8},
        },
    }
)
RIGHT, WRONG = Score(value=1.0), Score(value=0.0)


def scored_group(draw: int, outcomes: list[Outcome]) -> ScoredGroup:
    prompt = PromptGroup(
        job_id="demo-1f3a",
        group_id=f"demo-1f3a.g{draw:06d}",
        draw=draw,
        prompt_token_ids=np.array([1], np.int32),
        prompt_text="p<think>",
        gold="4",
        grader="math",
        num_samples=len(outcomes),
        sampling=SamplingParams(max_response_tokens=4),
        seed=0,
        min_policy_version=0,
    )
    rollouts = [
        Rollout(
            rollout_id=f"{prompt.group_id}.{i}",
            response_token_ids=np.array([7], np.int32),
            logprobs=np.array([-0.1], np.float32),
            version_spans=[VersionSpan(policy_version=0, num_tokens=1)],
            finish_reason="stop",
            text=f"answer {i}",
        )
        for i in range(len(outcomes))
    ]
    group = RolloutGroup(
        prompt=prompt, replica="r", rollouts=rollouts, sampled_at_s=0.0, sampling_s=0.0
    )
    return ScoredGroup(group=group, outcomes=outcomes, grading_s=0.0)


def keep_run(tmp_path: Path) -> Path:
    plan = make_plan(2, 2)
    file = SampleFile(plan.file_stem(tmp_path), plan, now_s=0.0)
    for row in range(2):
        keep(file, make_result(row, [RIGHT, WRONG]))
    file.finish()
    run_dir = tmp_path / plan.job_id
    recording = Recording(run_dir / RECORDING_FILE)
    for draw in (1, 0):
        recording.keep_group(scored_group(draw, [RIGHT, Unparseable()]))
    recording.close()
    (run_dir / "job.json").write_text(JOB.model_dump_json())
    return run_dir


def test_evaluations_and_recorded_groups_of_a_run_are_read(tmp_path: Path) -> None:
    found = list(read_run(keep_run(tmp_path)))
    assert [one.name for one in found[:2]] == ["v00000003 row 0.0", "v00000003 row 0.1"]
    assert [one.name for one in found[4:]] == [
        "demo-1f3a.g000000.0",
        "demo-1f3a.g000000.1",
        "demo-1f3a.g000001.0",
        "demo-1f3a.g000001.1",
    ]
    assert found[4].response == "<think>answer 0"  # the prompt opened the reasoning
    assert [one.before.kind for one in found[4:6]] == ["score", "unparseable"]


def test_each_is_judged_as_it_was_unless_the_command_says_otherwise(tmp_path: Path) -> None:
    found = list(read_run(keep_run(tmp_path)))
    of_evaluation, of_group = found[0].judging, found[4].judging
    assert (of_evaluation.grader, of_evaluation.timeout_s, of_evaluation.parts) == (
        "arithmetic", 5.0, ()
    )  # fmt: skip
    assert (of_group.grader, of_group.timeout_s, of_group.num_tokens) == ("math", 2.5, 1)
    assert (list(of_group.parts), of_group.overlong) == (JOB.reward.parts, JOB.reward.overlong)
    assert with_changes(found[4], grader=None, timeout_s=None) == found[4]
    other = with_changes(found[4], grader="aime", timeout_s=9.0).judging
    assert (other.grader, other.timeout_s, other.parts) == ("aime", 9.0, of_group.parts)


def test_a_request_is_never_larger_than_the_service_takes(tmp_path: Path) -> None:
    limits, one = LimitsConfig(), next(read_run(keep_run(tmp_path)))
    long = replace(one, response="ü" * limits.max_response_chars)
    recorded = [*[one] * 1500, *[long] * 40, one]
    parts = list(requests(recorded))
    assert [item["response"] for part in parts for item in part] == [r.response for r in recorded]
    assert max(len(part) for part in parts) == 1000
    bodies = [httpx.Request("POST", "http://here", json={"items": part}) for part in parts]
    assert max(len(body.content) for body in bodies) <= limits.max_body_bytes


def test_a_recording_without_its_job_is_refused(tmp_path: Path) -> None:
    run_dir = keep_run(tmp_path)
    (run_dir / "job.json").unlink()
    with pytest.raises(ConfigInvalid, match=r"job\.json does not say how the run was graded"):
        list(read_run(run_dir))


def test_only_what_is_judged_otherwise_differs(tmp_path: Path) -> None:
    recorded = list(read_run(keep_run(tmp_path)))[:4]
    after: list[Outcome] = [
        Score(value=1.0, reason="other words"),
        RIGHT,
        GraderError(reason="x"),
        WRONG,
    ]
    found = differences(recorded, after)
    assert [one.recorded.name for one in found] == ["v00000003 row 0.1", "v00000003 row 1.0"]
    assert [one.after.kind for one in found] == ["score", "error"]


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(JOB.model_dump_json())
    (tmp_path / RECORDING_FILE).write_text("no database, but long enough to be looked at")
    with pytest.raises(ConfigInvalid, match=r"recording\.sqlite cannot be read"):
        list(read_run(tmp_path))
    assert list(read_run(tmp_path / "evals")) == []
