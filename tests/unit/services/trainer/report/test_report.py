"""The report's numbers against events made by hand, whose answers can be worked out on paper."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.evaluation_alarms import KINDS
from services.cli.tables import verdict
from services.trainer.report import sentences, write_report
from services.trainer.report.curves import step_curves
from services.trainer.report.evaluations import compare, finished_evaluations
from services.trainer.report.events import read_events
from services.trainer.report.summary import Summary, summarise
from shared.messages import Event

JOB = {"name": "demo", "seed": 7, "steps": 4, "eval": {"suite": "sums"}}


class Run:
    """Builds events.jsonl line by line; one second passes with each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "events.jsonl"
        self.now_s = 100.0

    def add(self, name: str, **fields: Any) -> None:
        event = Event(
            name=name, job_id="demo-0001", service="trainer", replica="t", at_s=self.now_s,
            fields=fields,
        )  # fmt: skip
        self.now_s += 1
        with self.path.open("a") as file:
            file.write(event.model_dump_json() + "\n")

    def step(self, step: int, *, reward: float, delta: float, tokens: float = 10.0) -> None:
        self.add(
            "step", step=step, policy_version=step, groups=2, samples=4, tokens=80,
            reward_raw=reward, reward_trained=0.5, delta_logprob_mean=delta,
            delta_logprob_p99=10 * delta, delta_logprob_max=20 * delta, lag_mean=0.5, lag_max=1,
            response_tokens_mean=tokens, seconds={"wait": 1.0, "optimizer": 0.5}, step_seconds=2.0,
            bad_logprobs=0,
        )  # fmt: skip

    def evaluation(self, version: int, correct: list[int], **other: Any) -> None:
        mean = sum(correct) / (8 * len(correct))
        fields = {
            "eval_id": f"v{version}", "suite": "sums", "policy_version": version, "step": version,
            "num_problems": len(correct), "samples_per_problem": 8,
            "pass_at_k": {"1": mean, "8": 1.0}, "pass_at_1_ci": [mean - 0.1, mean + 0.1],
            "pass_at_k_ci": {"8": [0.9, 1.0]}, "truncated_share": 0.25,
            "per_problem_correct": correct, "rows": list(range(len(correct))),
        }  # fmt: skip
        self.add("eval_finished", **(fields | other))

    def summary(self) -> Summary:
        run = read_events(self.path)
        return summarise(run, step_curves(run), finished_evaluations(run))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def finished_run(run: Run) -> Run:
    run.add("job_started", job=JOB)
    run.add("weights_published", policy_version=0, bytes=100, seconds=0.1, servers=2)
    run.evaluation(0, [0, 2, 4, 8])
    for step in range(1, 5):
        run.step(step, reward=0.1 * step, delta=0.01)
        run.add("weights_published", policy_version=step, bytes=100, seconds=0.1, servers=2)
    run.evaluation(4, [2, 4, 6, 8])
    run.add("job_finished", state="finished", seconds=12.0)
    return run


def test_a_finished_run_is_summed_up(run: Run) -> None:
    summary = finished_run(run).summary()
    assert (summary.state, summary.steps, summary.steps_planned) == ("finished", 4, 4)
    assert summary.wall_s == 12.0
    assert summary.groups.trained == 8
    assert summary.samples_trained == 16
    assert summary.reward_raw.slope.per_step == pytest.approx(0.1)
    assert summary.reward_raw.first.mean == pytest.approx(0.15)  # of steps 1 and 2
    assert summary.reward_raw.last.mean == pytest.approx(0.35)
    half = 12.70620 * 0.05  # t(1) times the standard error
    assert summary.reward_raw.last.high == pytest.approx(0.35 + half, abs=1e-5)
    assert summary.reward_trained.first.mean == 0.5
    assert summary.delta_logprob.max == pytest.approx(0.2)
    assert summary.seconds_per_phase == {"wait": 4.0, "optimizer": 2.0, "other": 2.0}
    assert summary.updates.versions_published == 5
    assert summary.updates.last_version == 4


def test_before_and_after_are_paired_by_problem(run: Run) -> None:
    change = finished_run(run).summary().before_after
    assert change is not None
    # Differences of 2, 2, 2, 0 of 8: mean 0.1875, sd 0.125, t(3) = 3.18245.
    assert change.difference == pytest.approx(0.1875)
    half = 3.18245 * 0.125 / math.sqrt(4)
    assert change.low == pytest.approx(0.1875 - half, abs=1e-5)
    assert change.high == pytest.approx(0.1875 + half, abs=1e-5)
    assert change.p_value == pytest.approx(2 / 8, abs=0.03)  # two of eight choices of signs
    assert not change.is_significant
    assert "no change is shown" in sentences.before_after(change)


@pytest.mark.parametrize("difficulty", KINDS)
def test_reports_rarely_call_one_version_changed(run: Run, difficulty: str) -> None:
    """At most 5 % of 200 pairs, in the very sentences and tables that people read."""
    rng, alarms = np.random.default_rng(22), 0  # Student at 5 % has 13 alarms
    run.evaluation(0, [0])
    (template,) = run.summary().evaluations
    for _ in range(200):
        p = KINDS[difficulty](rng)
        before, after = (
            replace(template, correct=rng.binomial(8, p).tolist(), samples_per_problem=8, rows=[])
            for _ in range(2)
        )
        before = replace(before, rows=after.rows)
        change = compare(before, after)
        assert change is not None
        claimed = "no change is shown" not in sentences.before_after(change)
        told = verdict({"before_after": asdict(change)})
        assert claimed == change.is_significant == ("No change" not in told)
        alarms += claimed
    assert alarms <= 10


def test_different_problems_are_not_compared(run: Run) -> None:
    run.evaluation(0, [1, 2])
    run.evaluation(1, [1, 2, 3])
    assert run.summary().before_after is None


def test_other_rows_of_the_suite_are_not_compared(run: Run) -> None:
    run.evaluation(0, [1, 2], rows=[0, 1])
    run.evaluation(1, [1, 2], rows=[0, 2])
    assert run.summary().before_after is None


def test_an_evaluation_that_is_none_costs_no_report(run: Run) -> None:
    run.evaluation(0, [8, 0])
    run.add("eval_finished", eval_id="x")
    run.add("eval_finished", policy_version=1, num_problems="many")
    assert [one.policy_version for one in run.summary().evaluations] == [0]


def test_an_interval_that_one_problem_cannot_give_is_left_out(run: Run) -> None:
    run.evaluation(0, [1], pass_at_1_ci=None, pass_at_k_ci={"1": None, "8": None})
    assert run.summary().evaluations[0].pass_at_k_ci == {}


def test_a_replayed_step_counts_once(run: Run) -> None:
    run.step(1, reward=0.1, delta=0.01)
    run.step(2, reward=0.2, delta=0.01)
    run.step(2, reward=0.3, delta=0.01)
    summary = run.summary()
    assert summary.steps == 2
    assert summary.groups.trained == 4
    assert summary.reward_raw.last.mean == pytest.approx(0.3)


def test_drops_count_by_group_and_refusals_by_event(run: Run) -> None:
    for group, reason in [("a", "no_variance"), ("b", "too_old"), ("a", "no_variance")]:
        run.add("group_dropped", group_id=group, reason=reason)
    run.add("duplicate_refused", group_id="c")
    run.add("duplicate_refused", group_id="c")
    groups = run.summary().groups
    assert groups.dropped == {"no_variance": 1, "too_old": 1}
    assert groups.duplicates_refused == 2


def test_delta_logprob_is_weighted_by_response_tokens(run: Run) -> None:
    run.step(1, reward=0, delta=0.1, tokens=30)
    run.step(2, reward=0, delta=0.3, tokens=10)
    values = run.summary().delta_logprob
    assert values.mean == pytest.approx(0.15)
    assert values.largest_jump == pytest.approx(0.2)
    assert values.p99_worst_step == pytest.approx(3.0)


def test_a_torn_line_is_counted_and_an_unfinished_one_is_left(run: Run) -> None:
    run.step(1, reward=0.1, delta=0.01)
    with run.path.open("a") as file:
        file.write('{"name": "st\n')
    run.step(2, reward=0.1, delta=0.01)
    with run.path.open("a") as file:
        file.write('{"name": "step", "job')
    events = read_events(run.path)
    assert (len(events.events), events.num_lines, events.num_unreadable) == (2, 3, 1)
    assert any("1 of 3 event lines" in warning for warning in run.summary().warnings)


def test_a_resumed_job_has_not_ended(run: Run) -> None:
    run.add("job_started", job=JOB)
    run.add("job_finished", state="paused", error="paused on request")
    assert (run.summary().state, run.summary().error) == ("paused", "paused on request")
    run.add("job_started", job=JOB)
    summary = run.summary()
    assert (summary.state, summary.error) == ("unfinished", None)
    assert summary.restarts == {"job_taken_up_again": 1}


def test_a_job_without_evaluation_is_warned_about(run: Run) -> None:
    run.add("job_started", job={**JOB, "eval": None})
    assert any("biased by dynamic sampling" in warning for warning in run.summary().warnings)


def test_what_a_job_cuts_off_is_warned_about(run: Run) -> None:
    """A truncated distribution, and pairs of its warm-up that were too long."""
    run.add("job_started", job={**JOB, "sampling": {"top_p": 0.9}})
    run.add("pairs_skipped", number=3, first_line=7, longest=80, limit=56)
    warnings = "\n".join(run.summary().warnings)
    assert "sampling.top_p 0.9: completions are drawn from a truncated distribution" in warnings
    assert "3 warm-up pairs were skipped: their prompts have more than 56 tokens" in warnings


@pytest.mark.parametrize("end", [None, "rollback_ended", "rollback_failed"])
def test_a_rollback_that_is_on_is_warned_about(run: Run, end: str | None) -> None:
    run.add("job_started", job=JOB)
    run.add("rollback_started", policy_version=0, current_version=3)
    if end:
        run.add(end, policy_version=0, current_version=3)
    warning = "the rollback to version 0 has not been ended: no step begins until it is"
    assert (warning in run.summary().warnings) == (end is None)


def test_no_trend_is_claimed_when_the_interval_includes_zero(run: Run) -> None:
    for step, reward in enumerate([0.3, 0.5, 0.2, 0.4, 0.35, 0.3], start=1):
        run.step(step, reward=reward, delta=0.01)
    assert "shows no trend" in sentences.reward(run.summary())


def test_one_group_is_one_group(run: Run) -> None:
    run.step(1, reward=0.5, delta=0.01)
    found = run.summary()
    one = replace(found, groups=replace(found.groups, trained=1, duplicates_refused=1, dropped={}))
    assert sentences.groups(one) == "1 group was trained, 0 dropped, and 1 duplicate refused."


def test_a_rise_is_claimed_when_it_is_sure(run: Run) -> None:
    for step in range(1, 31):
        run.step(step, reward=0.02 * step + 0.01 * (step % 2), delta=0.01)
    assert "rose from" in sentences.reward(run.summary())


def test_report_of_a_finished_run_is_one_page_with_figures_inside(run: Run) -> None:
    page = write_report(finished_run(run).folder)
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 5
    assert "<script" not in html
    assert "paired difference of pass@1" in html
    assert "<h2>Offline evaluation</h2>" in html
    assert "href=" not in html  # read as a file it leads nowhere; where to look is told
    asked = "/evals/compare?before=demo-0001/v00000000&amp;after=demo-0001/v00000004"
    assert f"<code>{asked}</code>" in html
    stored = json.loads((run.folder / "summary.json").read_text())
    assert stored["groups"]["trained"] == 8
    assert stored["delta_logprob"]["slope"]["num_steps"] == 4
    assert not list(run.folder.glob(".*.tmp"))


@pytest.mark.parametrize("num_steps", [0, 1])
def test_report_of_a_run_that_hardly_began(run: Run, num_steps: int) -> None:
    if num_steps:
        run.add("job_started", job=JOB)
        run.step(1, reward=math.nan, delta=0.1)
    html = write_report(run.folder).read_text()
    assert "The job has not ended" in html
    assert "No evaluation has finished" in html
    assert "<h2>Offline evaluation</h2>" not in html  # a card without anything in it
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == num_steps


def test_an_evaluation_without_a_result_is_a_warning_with_its_version(run: Run) -> None:
    """Told by both who noticed; of one that was answered late there is a result."""
    finished_run(run)
    run.add("eval_failed", eval_id="v4", policy_version=4, error="no result by the deadline")
    for error in ("no reward server", "no result by the deadline"):
        run.add("eval_failed", eval_id="v2", policy_version=2, error=error)
    run.add("suite_failed", eval_id="v4", suite="aime", policy_version=4, error="no such file")
    warnings = run.summary().warnings
    assert "1 evaluations failed, of version 2; the last: no result by the deadline" in warnings
    assert "1 further suites of evaluations failed; the last: no such file" in warnings


def test_text_from_a_job_is_escaped(run: Run) -> None:
    run.add("job_started", job=JOB)
    run.add("job_finished", state="failed", error="<script>alert(1)</script>")
    assert "<script" not in write_report(run.folder).read_text()
