"""A plan is a function of its request; what does not fit is skipped and counted."""

import json
from pathlib import Path

import pytest

from services.evaluator.plan import EvaluationFailed, Plan, plans_of_job
from shared.job import Job
from shared.messages import EvalRequested

CHECKPOINT = Path("assets/tiny-dsv4")


def make_job(tmp_path: Path, problems: list[str], **eval_fields: object) -> Job:
    suite = tmp_path / "suite.jsonl"
    rows = [json.dumps({"problem": p, "answer": str(len(p))}) for p in problems]
    suite.write_text("\n".join(rows) + "\n")
    return Job.model_validate(
        {
            "name": "demo",
            "seed": 5,
            "steps": 1,
            "model": {"rollout_checkpoint": str(CHECKPOINT)},
            "data": {"path": str(suite)},
            "sampling": {"context_length": 32, "max_response_tokens": 16},
            "eval": {
                "suite": "tiny",
                "data": {"path": str(suite)},
                "max_response_tokens": 20,
                "samples_per_problem": 4,
                **eval_fields,
            },
        }
    )


def make_request(policy_version: int = 3) -> EvalRequested:
    return EvalRequested(
        job_id="demo-1f3a",
        eval_id=f"demo-1f3a.e{policy_version:08d}",
        policy_version=policy_version,
        step=policy_version,
        deadline_s=1e10,
    )


def make_plan(tmp_path: Path, problems: list[str], policy_version: int = 3) -> Plan:
    (plan,) = plans_of_job(make_request(policy_version), make_job(tmp_path, problems))
    return plan


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    fits, too_long = "x" * 12, "x" * 13
    plan = make_plan(tmp_path, [fits, too_long, "1+1="])
    assert [problem.row for problem in plan.problems] == [0, 2]
    assert plan.num_skipped == 1


def test_prompts_are_encoded_as_the_checkpoint_says(tmp_path: Path) -> None:
    (problem,) = make_plan(tmp_path, ["1+1="]).problems
    assert problem.token_ids == [52, 46, 52, 64]
    assert problem.gold == "4"


def test_sampling_is_the_suites_and_stops_at_the_end_token(tmp_path: Path) -> None:
    sampling = make_plan(tmp_path, ["1+1="]).sampling
    assert sampling.max_response_tokens == 20
    assert sampling.stop_token_ids == [1]


def test_seeds_differ_by_sample_and_version_and_stay_the_same(tmp_path: Path) -> None:
    plans = [make_plan(tmp_path, ["1+1=", "2+2="], version) for version in (3, 4, 3)]
    seeds = [[plan.seed_of(one, i) for one in plan.problems for i in range(3)] for plan in plans]
    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 12
    assert max(seeds[0]) < 2**53


def test_max_problems_takes_the_first(tmp_path: Path) -> None:
    job = make_job(tmp_path, ["1+1=", "2+2=", "3+3="], max_problems=2)
    (plan,) = plans_of_job(make_request(), job)
    assert [problem.row for problem in plan.problems] == [0, 1]


def test_job_without_a_suite_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, ["1+1="]).model_copy(update={"eval": None})
    with pytest.raises(EvaluationFailed, match="no eval section"):
        plans_of_job(make_request(), job)


def test_further_suites_have_plans_of_their_own_and_the_first_comes_last(tmp_path: Path) -> None:
    other = {
        "suite": "AIME 2025",
        "data": {"path": str(tmp_path / "suite.jsonl"), "prompt_template": "Q {problem}"},
        "max_response_tokens": 8,
        "samples_per_problem": 2,
        "temperature": 0.6,
        "top_p": 0.95,
        "budgets": [4, 2, 8],
        "grader": "math",
    }
    job = make_job(tmp_path, ["1+1="], also=[other])
    second, first = plans_of_job(make_request(), job)
    assert (first.eval_id, first.stem, first.suite) == ("demo-1f3a.e00000003", "v00000003", "tiny")
    assert second.eval_id == "demo-1f3a.e00000003.AIME-2025"
    assert second.stem == "v00000003.AIME-2025"
    assert (second.samples_per_problem, second.grader, second.budgets) == (2, "math", [2, 4])
    assert (second.sampling.temperature, second.sampling.top_p) == (0.6, 0.95)
    assert second.problems[0].prompt == "Q 1+1="


def test_a_chat_format_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    data = {"path": str(tmp_path / "suite.jsonl"), "prompt_format": "thinking"}
    job = make_job(tmp_path, ["1+1="], data=data)
    with pytest.raises(EvaluationFailed, match="has no token '<｜User｜>'"):
        plans_of_job(make_request(), job)
