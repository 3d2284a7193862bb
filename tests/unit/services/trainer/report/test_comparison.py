"""Two runs made by hand: what differs in their settings, and numbers worked out on paper."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.commands import app
from services.trainer.report.comparison import compare_runs, pass_at_k, read_side
from services.trainer.report.comparison_page import render_comparison
from services.trainer.run_environment import write_environment
from shared.messages import Event

PROBLEMS = 40


def write_run(folder: Path, *, right: list[int], reward: float, job: dict[str, Any]) -> Path:
    folder.mkdir()
    lines: list[Event] = []

    def add(name: str, **fields: Any) -> None:
        lines.append(
            Event(
                name=name, job_id=folder.name, service="trainer", replica="t",
                at_s=100.0 + len(lines), fields=fields,
            )
        )  # fmt: skip

    add("job_started", job={"name": "demo", "steps": 4, **job})
    for step in range(1, 5):
        add(
            "step", step=step, reward_raw=reward * step, delta_logprob_mean=0.01, groups=2,
            tokens_per_s=50.0, seconds={"wait": 1.0}, step_seconds=2.0 / reward,
        )  # fmt: skip
    add(
        "eval_finished", suite="sums", policy_version=4, step=4, num_problems=len(right),
        samples_per_problem=4, pass_at_k={"1": sum(right) / 4 / len(right), "2": 0.5},
        per_problem_correct=right, rows=list(range(len(right))),
    )  # fmt: skip
    (folder / "events.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in lines))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    job = {"algorithm": {"name": "grpo", "max_lag": 1}, "seed": 1}
    other = {"algorithm": {"name": "grpo", "max_lag": 0}, "seed": 1, "record": True}
    return (
        write_run(tmp_path / "left", right=[1] * PROBLEMS, reward=0.1, job=job),
        write_run(tmp_path / "right", right=[2, 3] * (PROBLEMS // 2), reward=0.2, job=other),
    )


def test_what_is_set_differently_is_listed_and_nothing_else(pair: tuple[Path, Path]) -> None:
    found = compare_runs(*map(read_side, pair))
    assert [(one.key, one.a, one.b) for one in found.settings] == [
        ("algorithm.max_lag", 1, 0),
        ("record", "–", True),
    ]


def test_a_section_of_one_run_alone_is_one_line_and_no_evaluation_is_said(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    job = {"algorithm": {"name": "grpo", "max_lag": 1}, "seed": 1, "eval": {"suite": "x", "k": 2}}
    asked = write_run(tmp_path / "asked", right=[1] * PROBLEMS, reward=0.1, job=job)
    lines = (pair[0] / "events.jsonl").read_text().splitlines(keepends=True)
    (pair[0] / "events.jsonl").write_text("".join(one for one in lines if "eval_" not in one))
    for folder, path in ((asked, "/one"), (pair[0], "/two")):
        for process in ("trainer", "reward-0"):
            write_environment(folder, process, {"variables": {"PYTHONPATH": path}})
    found = compare_runs(read_side(asked), read_side(pair[0]))
    assert [(one.key, one.a, one.b) for one in found.settings] == [
        ("eval", "given (2 fields)", "–")
    ]
    assert [(one.key, one.a, one.b) for one in found.machines] == [
        ("2 processes: variables.PYTHONPATH", "/one", "/two")
    ]
    assert found.absence == "pass@k is not compared; never evaluated: left."
    shown = CliRunner().invoke(app, ["runs", "compare", str(asked), str(pair[0])])
    assert "never evaluated: left" in shown.output


def test_machines_differ_by_what_something_follows_from(pair: tuple[Path, Path]) -> None:
    for folder, torch, port in zip(pair, ("2.12.0", "2.13.0"), (1, 2), strict=True):
        found = {
            "packages": {"torch": torch, "numpy": "2.4"}, "pid": port,
            "settings": {"port": port, "runs_dir": str(folder), "drain_s": 20},
            "variables": {"OMP_NUM_THREADS": "1", "TORCH_DUMP": f"{folder}/dump"},
        }  # fmt: skip
        write_environment(folder, "rank0", found)
    machines = compare_runs(*map(read_side, pair)).machines
    assert [(one.key, one.a, one.b) for one in machines] == [
        ("rank0.packages.torch", "2.12.0", "2.13.0")
    ]


def test_pass_at_k_is_paired_over_the_same_problems(pair: tuple[Path, Path]) -> None:
    found = compare_runs(*map(read_side, pair))
    one, two = found.passes
    assert (one.k, two.k) == ("1", "2")
    assert one.difference == pytest.approx(0.375)  # 2.5 of 4 against 1 of 4
    assert one.low < 0.375 < one.high
    assert one.is_significant
    # Two of four samples: right 1 -> 1/2, right 2 -> 5/6, right 3 -> 1.
    assert two.difference == pytest.approx((5 / 6 + 1) / 2 - 1 / 2)


def test_other_problems_are_not_paired(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", right=[1] * 10, reward=0.1, job={})
    found = compare_runs(read_side(pair[0]), read_side(other))
    assert not any(one.is_paired or one.is_significant for one in found.passes)
    assert "not the same" in render_comparison(found)


def test_measures_are_those_of_the_runs(pair: tuple[Path, Path]) -> None:
    measures = {one.name: (one.a, one.b) for one in compare_runs(*map(read_side, pair)).measures}
    assert measures["online reward, mean"] == pytest.approx((0.25, 0.5))
    assert measures["step, mean"] == pytest.approx((20.0, 10.0))
    assert measures["mean |Δ log p|"] == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("correct", range(6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(correct: int) -> None:
    samples = [place < correct for place in range(5)]
    for k in range(1, 6):
        draws = list(itertools.combinations(samples, k))
        assert pass_at_k(correct, 5, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_page_needs_nothing_but_itself(pair: tuple[Path, Path]) -> None:
    page = render_comparison(compare_runs(*map(read_side, pair)))
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_the_command_compares_folders(pair: tuple[Path, Path], tmp_path: Path) -> None:
    names = ["left", "right", "--runs-dir", str(tmp_path)]
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["runs", "compare", *names])
    assert shown.exit_code == 0, shown.output
    assert "algorithm.max_lag" in shown.output
    assert "+0.375 *" in shown.output
    page = tmp_path / "pair.html"
    answer = CliRunner().invoke(app, ["runs", "compare", *names, "--page", str(page), "--json"])
    document = json.loads(answer.stdout)
    assert document["pass_at_k"][0]["difference"] == pytest.approx(0.375)
    assert document["curves"]["reward_raw"]["b"] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert page.read_text().startswith("<!doctype html>")


def test_a_folder_that_is_no_run_is_said_to_be_none(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    answer = CliRunner().invoke(app, ["runs", "compare", str(pair[0]), str(tmp_path)])
    assert answer.exit_code == 1
    assert "has no events.jsonl" in answer.stderr
