"""What an evaluation keeps survives a crash, and never mixes with another evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.evaluator.plan import Plan, Problem
from services.evaluator.results import summarise
from services.evaluator.sample_file import SampleFile, samples_of
from services.evaluator.samples import GradedSample, ProblemResult, read_samples
from shared.messages import GraderError, Outcome, SamplingParams, Score, Timeout, Unparseable
from shared.tokenizer import CheckpointTokenizer

TOKENIZER = CheckpointTokenizer.load(Path("assets/tiny-dsv4"))
RIGHT, WRONG = Score(value=1.0, extracted="4"), Score(value=0.0, extracted="5")


def make_plan(num_problems: int = 3, samples: int = 2) -> Plan:
    return Plan(
        eval_id="demo-1f3a.e00000003",
        job_id="demo-1f3a",
        stem="v00000003",
        suite="tiny",
        policy_version=3,
        step=3,
        problems=[Problem(row, f"line {row}", "p", [1], "4") for row in range(num_problems)],
        num_skipped=1,
        max_prompt_tokens=32,
        shortest_skipped=61,
        samples_per_problem=samples,
        sampling=SamplingParams(max_response_tokens=8),
        grader="arithmetic",
        grading_timeout_s=5.0,
        seed=0,
        deadline_s=1e10,
        max_running_requests=8,
        budgets=[],
        tokenizer=TOKENIZER,
    )


def make_result(row: int, outcomes: list[Outcome], *, cut: bool = False) -> ProblemResult:
    samples = [
        GradedSample(
            text="ü;4",
            token_ids=[7] * (index + 1),
            finish_reason="length" if cut else "stop",
            outcome=outcome,
        )
        for index, outcome in enumerate(outcomes)
    ]
    return ProblemResult(
        row=row, source="s", prompt="p", gold="4", policy_version=3, samples=samples
    )


def open_file(tmp_path: Path, plan: Plan, now_s: float = 1.0) -> SampleFile:
    return SampleFile(plan.file_stem(tmp_path), plan, now_s=now_s)


def keep(file: SampleFile, result: ProblemResult) -> None:
    for line in samples_of(result):
        file.add(line)


def test_samples_survive_a_restart_one_by_one(tmp_path: Path) -> None:
    first = open_file(tmp_path, make_plan(), now_s=1.0)
    drawn, judged, next_drawn, _ = samples_of(make_result(1, [RIGHT, Unparseable(reason="none")]))
    for line in (drawn, judged, next_drawn):
        first.add(line)
    again = open_file(tmp_path, make_plan(), now_s=9.0)
    assert again.drawn == first.drawn == {(1, 0): drawn, (1, 1): next_drawn}
    assert again.judged == first.judged == {(1, 0): judged}
    assert (again.began_at_s, again.num_finished) == (1.0, 0)


@pytest.mark.parametrize("last", [b'"kind":"score"', b'"text":"\xc3'])
def test_line_cut_off_by_a_crash_is_done_again(tmp_path: Path, last: bytes) -> None:
    """Wherever it was cut, within a character as well."""
    first = open_file(tmp_path, make_plan())
    keep(first, make_result(0, [RIGHT, WRONG]))
    drawn, judged, next_drawn, next_judged = samples_of(make_result(1, [RIGHT, WRONG]))
    for line in (drawn, judged, next_drawn, next_judged):
        first.add(line)
    partial = tmp_path / "demo-1f3a/evals/v00000003.partial.jsonl"
    whole = partial.read_bytes()
    partial.write_bytes(whole[: whole.rindex(last) + len(last)])
    again = open_file(tmp_path, make_plan())
    assert list(again.judged) == [(0, 0), (0, 1), (1, 0)]
    cut = next_judged if last.startswith(b'"kind"') else next_drawn
    assert ((1, 1) in again.drawn) == (cut is next_judged)
    keep(again, make_result(1, [WRONG, WRONG]))
    assert open_file(tmp_path, make_plan()).num_finished == 2


def test_a_sample_of_another_version_is_neither_kept_nor_taken_up(tmp_path: Path) -> None:
    file = open_file(tmp_path, make_plan())
    keep(file, make_result(0, [RIGHT, WRONG]))
    other = make_result(1, [RIGHT, WRONG]).model_copy(update={"policy_version": 4})
    with pytest.raises(ValueError, match="version 4 among those of 3"):
        keep(file, other)
    partial = tmp_path / "demo-1f3a/evals/v00000003.partial.jsonl"
    with partial.open("a") as lines:
        lines.writelines(one.model_dump_json() + "\n" for one in samples_of(other))
    assert list(open_file(tmp_path, make_plan()).drawn) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": 4},
        {"eval_id": "other"},
        {"samples_per_problem": 3},
        {"seed": 1},
        {"grading_timeout_s": 1.0},
        {"problems": [replace(one, token_ids=[2]) for one in make_plan().problems]},
        {"problems": [replace(one, gold="5") for one in make_plan().problems]},
    ],
)
def test_samples_of_another_evaluation_are_never_used(
    tmp_path: Path, change: dict[str, object]
) -> None:
    keep(open_file(tmp_path, make_plan()), make_result(0, [RIGHT, WRONG]))
    other = replace(make_plan(), **change)  # type: ignore[arg-type]
    assert open_file(tmp_path, other).drawn == {}


def test_finished_file_of_another_evaluation_does_not_hide_what_is_kept(tmp_path: Path) -> None:
    finished = open_file(tmp_path, make_plan())
    for row in range(3):
        keep(finished, make_result(row, [RIGHT, WRONG]))
    finished.finish()
    other = replace(make_plan(), seed=1)
    keep(open_file(tmp_path, other), make_result(0, [WRONG, WRONG]))
    again = open_file(tmp_path, other)
    assert list(again.judged) == [(0, 0), (0, 1)]
    assert read_samples(finished.path)[0].seed == 0  # until the other one is finished


def test_finished_file_has_every_problem_in_order(tmp_path: Path) -> None:
    plan = make_plan()
    file = open_file(tmp_path, plan)
    for row in (2, 0, 1):
        keep(file, make_result(row, [RIGHT, WRONG]))
    file.finish()
    header, results = read_samples(tmp_path / "demo-1f3a/evals/v00000003.jsonl")
    assert [result.row for result in results] == [0, 1, 2] == header.rows
    assert not list(tmp_path.rglob("*.partial.jsonl"))
    assert open_file(tmp_path, plan).num_finished == 3  # asked again: nothing is repeated


def test_summary_counts_what_the_samples_say() -> None:
    results = [
        make_result(0, [RIGHT, RIGHT]),
        make_result(1, [RIGHT, Score(value=0.9)]),
        make_result(2, [Timeout(after_s=5.0), GraderError(reason="died")], cut=True),
    ]
    summary = summarise(make_plan(), results, seconds=2.0)
    assert summary["pass_at_k"] == {"1": 0.5, "2": pytest.approx(2 / 3)}
    assert summary["per_problem_correct"] == [2, 1, 0]
    assert summary["outcomes"] == {"score": 4, "unparseable": 0, "timeout": 1, "error": 1}
    assert summary["truncated_share"] == pytest.approx(1 / 3)
    assert summary["pass_at_1_untruncated"] == 0.75
    assert summary["response_tokens_mean"] == 1.5
    assert summary["skipped_problems"] == 1
    low, high = summary["pass_at_1_ci"]
    assert 0 <= low < 0.5 < high <= 1


def test_every_k_is_published() -> None:
    plan = replace(make_plan(), samples_per_problem=6)
    summary = summarise(plan, [make_result(0, [RIGHT] + [WRONG] * 5)], seconds=1.0)
    assert summary["pass_at_k"] == {str(k): pytest.approx(k / 6) for k in range(1, 7)}
    assert summary["pass_at_k_ci"].keys() == summary["pass_at_k"].keys()


def test_budgets_tell_what_less_room_would_have_given() -> None:
    """Two right answers, one of them longer than the smaller budget and wrong where it is cut."""
    short = GradedSample(text="", token_ids=[7] * 3, finish_reason="stop", outcome=RIGHT)
    long = GradedSample(
        text="",
        token_ids=[7] * 6,
        finish_reason="stop",
        outcome=RIGHT,
        cut={4: Unparseable(reason="cut")},
    )
    results = [
        make_result(row, []).model_copy(update={"samples": [short, long]}) for row in range(3)
    ]
    summary = summarise(replace(make_plan(), budgets=[4]), results, seconds=1.0)
    small, full = summary["budgets"]
    assert (small["budget"], full["budget"]) == (4, 8)
    assert (small["pass_at_1"], full["pass_at_1"]) == (0.5, 1.0)
    assert (small["truncated_share"], full["truncated_share"]) == (0.5, 0.0)
    assert (small["pass_at_1_untruncated"], small["num_untruncated"]) == (1.0, 3)
