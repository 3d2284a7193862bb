"""Pages about evaluations on disk: everything can be reached, nothing of it is trusted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from services.evaluator.archive import Archive
from services.evaluator.browsing import router
from services.evaluator.results import summarise
from services.evaluator.sample_file import SampleFile
from services.evaluator.samples import GradedSample, ProblemResult, write_summary
from shared.messages import Outcome, SamplingParams, Score, Unparseable
from tests.unit.services.evaluator.test_samples import keep as keep_problem
from tests.unit.services.evaluator.test_samples import make_plan

HOSTILE = "<script>alert(1)</script>"


def keep(
    runs: Path,
    *,
    version: int,
    num_right: int,
    prompt: str = "p",
    suite: str = "tiny",
    temperature: float = 1.0,
    stem: str = "",
    seed: int = 0,
) -> str:
    """One evaluation of twelve problems, eight samples each, as an evaluator leaves it."""
    stem = stem or f"v{version:08d}"
    like = make_plan(12, 8)
    prompts = [f"{prompt} {problem.row} {HOSTILE}" for problem in like.problems]
    plan = replace(
        like,
        problems=[
            replace(problem, prompt=text)
            for problem, text in zip(like.problems, prompts, strict=True)
        ],
        stem=stem,
        eval_id=f"demo-1f3a.e{version:08d}",
        suite=suite,
        policy_version=version,
        step=version,
        seed=seed,
        budgets=[4],
        sampling=SamplingParams(max_response_tokens=8, temperature=temperature),
    )
    file = SampleFile(plan.file_stem(runs), plan, now_s=1.0)
    for problem in plan.problems:
        outcomes: list[Outcome] = [
            Score(value=float(i < num_right), extracted=HOSTILE if i == 0 else "5")
            for i in range(7)
        ]
        samples = [
            GradedSample(
                text=f"{HOSTILE} {i}",
                token_ids=[7] * 6,
                finish_reason="stop",
                outcome=outcome,
                cut={4: Unparseable(reason="cut")},
            )
            for i, outcome in enumerate([*outcomes, Unparseable(reason=HOSTILE)])
        ]
        keep_problem(
            file,
            ProblemResult(
                row=problem.row,
                source="s",
                prompt=problem.prompt,
                gold="4",
                policy_version=version,
                samples=samples,
            ),
        )
    summary = summarise(plan, file.finish(), seconds=2.0)
    write_summary(file.path.with_suffix(".json"), summary)
    return f"demo-1f3a/{stem}"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(router)
    app.state.archive = Archive(tmp_path)
    with TestClient(app) as client:
        yield client


def test_no_evaluations_are_no_error(client: TestClient) -> None:
    assert "No evaluation has finished yet" in client.get("/evals").text


def test_index_shows_every_evaluation_and_where_a_run_is_going(
    client: TestClient, tmp_path: Path
) -> None:
    names = [keep(tmp_path, version=10 * i, num_right=2 * i) for i in range(3)]
    page = client.get("/evals").text
    assert all(f'href="/evals/{name}"' in page for name in names)
    assert (
        "rising: pass@1 +50.0 points over 20 steps (95 % interval +50.0 to +50.0, p = 0.00" in page
    )
    assert "First to last: wider coverage: problems are solved now" in page
    assert "that eight samples did not solve before.</p>" in page
    assert "by the line through 3 evaluations of 12 problems." in page
    assert '<td class="n">[50.0%, 50.0%]</td>' in page
    assert '<link rel="icon" href="/assets/icon.svg">' in page
    assert "Coverage is wider where pass@8 rose" in page
    assert HOSTILE not in page


def test_a_version_counts_once_for_each_seed(client: TestClient, tmp_path: Path) -> None:
    """Whoever asked for it again: the job, the command line, somebody over REST."""
    for version, num_right in ((0, 1), (10, 2), (20, 4)):
        keep(tmp_path, version=version, num_right=num_right)
    alone = client.get("/evals").text.split(", by the line")[0].split("tiny: ")[1]
    for stem in ("c1.tiny", "c2.tiny"):
        keep(tmp_path, version=0, num_right=1, stem=stem)
    page = client.get("/evals").text
    told = "by the line through 3 evaluations of 12 problems (2 with the same samples left out)."
    assert f"tiny: {alone}, {told}" in page
    keep(tmp_path, version=20, num_right=5, stem="c3.tiny", seed=1)
    assert "the line through 4 evaluations of 12 problems (2 with" in client.get("/evals").text


def test_an_evaluation_leads_to_each_problem_and_its_samples(
    client: TestClient, tmp_path: Path
) -> None:
    name = keep(tmp_path, version=3, num_right=2)
    page = client.get(f"/evals/{name}").text
    assert "all of version 3" in page
    assert f'href="/evals/{name}/11"' in page
    assert "Response budgets" in page
    problem = client.get(f"/evals/{name}/11").text
    assert problem.count(": right</b>") == 2
    assert problem.count(": wrong</b>") == 5
    assert problem.count(": unparseable</b>") == 1
    assert "at 4: unparseable" in problem
    assert "&lt;script&gt;alert(1)&lt;/script&gt; 7" in problem
    assert HOSTILE not in page + problem


def test_comparison_names_gained_and_lost_problems(client: TestClient, tmp_path: Path) -> None:
    before = keep(tmp_path, version=0, num_right=0)
    after = keep(tmp_path, version=1, num_right=5)
    page = client.get("/evals/compare", params={"before": before, "after": after}).text
    assert "Gained: 12" in page
    assert "Lost: none" in page
    assert page.count('<div class="wide"><table>') == page.count("<table>") == 3
    assert "sign-flip test over problems is at most 2.5 %" in page
    assert page.count(">changed</span>") == 4
    body: dict[str, Any] = client.get(
        "/v1/evals/compare", params={"before": after, "after": before}
    ).json()
    assert body["lost"] == list(range(12))
    assert body["verdict"] == "undecided"
    assert body["changes"][0]["difference"]["mean"] == pytest.approx(-5 / 8)


def test_what_was_asked_differently_is_no_trend_and_no_verdict(
    client: TestClient, tmp_path: Path
) -> None:
    before = keep(tmp_path, version=0, num_right=0, temperature=0.6)
    after = keep(tmp_path, version=10, num_right=5)
    keep(tmp_path, version=20, num_right=5)
    index = client.get("/evals").text
    assert "rising: " not in index
    assert "tiny, temperature 0.6 → 1.0: no trend is shown" in index
    pair = {"before": before, "after": after}
    page = client.get("/evals/compare", params=pair).text
    assert "Not asked alike: temperature 0.6 → 1.0." in page
    assert "All problems, by change: 12" in page
    judgements = ("undecided", "changed<", "no change", "Gained", "Lost", 'class="good"', "#p")
    assert [told for told in judgements if told in page] == []
    body = client.get("/v1/evals/compare", params=pair).json()
    assert body["asked_differently"] == ["temperature 0.6 → 1.0"]
    assert body["verdict"] == "undecided"
    assert not any(change["is_significant"] for change in body["changes"])


@pytest.mark.parametrize(
    "address",
    [
        "/evals/demo-1f3a/v00000009",
        "/evals/..%2f..%2fetc/passwd",
        "/evals/demo-1f3a/v00000003/99",
        "/evals/compare?before=x&after=y",
        "/evals/compare?before=demo-1f3a/v00000003&after=../../x",
    ],
)
def test_what_is_not_there_is_a_404(client: TestClient, tmp_path: Path, address: str) -> None:
    keep(tmp_path, version=3, num_right=2)
    assert client.get(address).status_code == 404


def test_other_problems_cannot_be_compared(client: TestClient, tmp_path: Path) -> None:
    one = keep(tmp_path, version=0, num_right=1)
    other = keep(tmp_path, version=1, num_right=1, prompt="q")
    answer = client.get("/evals/compare", params={"before": one, "after": other})
    assert answer.status_code == 422
    assert "no problem in common" in answer.json()["detail"]
    assert "no trend" in client.get("/evals").text  # and the index goes on without them
