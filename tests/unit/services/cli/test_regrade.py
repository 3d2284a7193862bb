"""A recorded run is read as it was graded, and only what is judged otherwise is shown."""

from pathlib import Path

import numpy as np
import pytest

from services.cli.regrade import differences, read_run
from services.evaluator.sample_file import SampleFile
from services.trainer.recording import RECORDING_FILE, Recording
from shared.errors import ConfigInvalid
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
    (tmp_path / RECORDING_FILE).write_text("no database, but long enough to be looked at")
    with pytest.raises(ConfigInvalid, match=r"recording\.sqlite cannot be read"):
        list(read_run(tmp_path))
    assert list(read_run(tmp_path / "evals")) == []
