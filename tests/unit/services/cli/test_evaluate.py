"""How `eval` asks when little is said, and what it says of a result that nobody could grade."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import evaluate
from services.cli.commands import app
from services.cli.document import read_job
from services.cli.eval_request import defaults_of, merged
from shared.errors import ConfigInvalid
from shared.job import Job

ROOT = Path(__file__).parents[4]
TINY = ROOT / "assets/tiny-dsv4"
RESULT: dict[str, Any] = {
    "eval_id": "demo-1.c1", "suite": "arithmetic-heldout", "policy_version": 8, "step": 8,
    "num_problems": 2, "samples_per_problem": 1, "skipped_problems": 0, "seconds": 0.1,
    "pass_at_k": {"1": 0.0}, "pass_at_k_ci": {"1": [0.0, 0.5]}, "pass_at_1_sampling_ci": [0.0, 0.5],
    "truncated_share": 0.0, "unparseable_share": 1.0, "timeout_share": 0.0,
    "response_tokens_mean": 8.0, "budgets": [],
    "asked": {"grader": "math", "max_response_tokens": 24},
}  # fmt: skip


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version of a run of the demo's job."""
    folder = tmp_path / "demo-1" / "weights" / "v00000008"
    folder.mkdir(parents=True)
    document = read_job(ROOT / "configs/demo.toml", [])
    document["model"]["rollout_checkpoint"] = str(TINY)
    job = Job.model_validate(document)
    (tmp_path / "demo-1" / "job.json").write_text(job.model_dump_json())
    return folder


def test_a_runs_version_is_asked_as_its_run_asks(version: Path) -> None:
    body = defaults_of("arithmetic-heldout", version).body
    assert (body["grader"], body["max_response_tokens"], body["samples_per_problem"]) == (
        "arithmetic", 24, 8,
    )  # fmt: skip
    assert body["data"]["path"].endswith("assets/arithmetic/heldout.jsonl")
    assert "every_steps" not in body


def test_another_suite_of_a_runs_version_is_graded_as_its_training(version: Path) -> None:
    body = defaults_of("mine", version).body
    assert (body["grader"], body["max_response_tokens"]) == ("arithmetic", 24)


@pytest.mark.parametrize(("context", "tokens"), [(None, 2048), (64, 32), (100_000, 4096)])
def test_a_response_leaves_room_for_the_prompt(context: int | None, tokens: int) -> None:
    for suite, grader in (("aime-2024", "aime"), ("mine", "math")):
        body = defaults_of(suite, TINY, context).body
        assert (body["max_response_tokens"], body["grader"]) == (tokens, grader)


def test_a_broken_job_is_named(version: Path) -> None:
    (version.parent.parent / "job.json").write_text("{")
    with pytest.raises(ConfigInvalid, match=r"job\.json is no job"):
        defaults_of("mine", version)


def test_what_is_given_replaces_key_by_key() -> None:
    default = {"grader": "math", "data": {"dataset": "a/b", "prompt_template": "{problem}="}}
    found = merged(default, {"grader": "aime", "data": {"path": "x.jsonl"}})
    data = {"path": "x.jsonl", "prompt_template": "{problem}="}
    assert found == {"grader": "aime", "data": data}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_grader_is_told_and_a_suite_without_answers_warned_of(
    version: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    bodies: list[dict[str, Any]] = []

    async def ask(_: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        return RESULT | {"unparseable_share": share}

    monkeypatch.setattr(evaluate, "_ask", ask)
    command = ["eval", str(version), "--suite", "arithmetic-heldout", "--grader", "math"]
    shown = CliRunner().invoke(app, [*command, "--evaluator", "http://x"])
    assert shown.exit_code == 0, shown.output
    assert "grader math, at most 24 tokens" in shown.stdout
    assert ("found no answer in 100% of the samples" in shown.stderr) == (share == 1)
    assert (bodies[0]["grader"], bodies[0]["max_response_tokens"]) == ("math", 24)
    assert "as the checkpoint's run asks arithmetic-heldout" in shown.stderr
    as_json = CliRunner().invoke(app, [*command, "--evaluator", "http://x", "--json"])
    assert json.loads(as_json.stdout)["unparseable_share"] == share


def test_a_suite_without_a_file_is_refused() -> None:
    shown = CliRunner().invoke(app, ["eval", str(TINY), "--suite", "mine"])
    assert shown.exit_code == 2
    assert "--data" in shown.output
