"""Carry out one plan: sample each problem, grade it, keep it, and sum up at the end.

        plan ──> problems not kept yet ──> sample (pinned) ──> grade ──> keep ──┐
                      several at a time ────────────────────────────────────────┴─> summary

Finished problems are kept one by one, so whoever takes the evaluation up again asks for the rest.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.evaluator.config import RunnerConfig
from services.evaluator.plan import EvaluationFailed, Plan, Problem
from services.evaluator.results import summarise
from services.evaluator.samples import GradedSample, ProblemResult, SampleFile, write_summary
from services.evaluator.servers import Address, Completion, Graders, PinnedSampler
from shared.errors import Retryable
from shared.http import HttpClient
from shared.messages import Outcome
from shared.tasks import end
from shared.telemetry import counter, histogram, now_s

log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Gets the number of finished problems and of all."""


class Runner:
    """Carries out plans; a stop leaves what is finished for the next time."""

    def __init__(self, http: HttpClient, config: RunnerConfig, *, runs_dir: Path) -> None:
        self._http = http
        self._config = config
        self._runs_dir = runs_dir
        self._samples = counter("eval_samples_total", "Graded samples.", ("outcome",))
        self._seconds = histogram(
            "eval_seconds",
            "Duration of an evaluation.",
            buckets=(1, 3, 10, 30, 100, 300, 1000, 3600),
        )

    async def run(
        self,
        plan: Plan,
        *,
        sampler: Address,
        graders: Address,
        stop: asyncio.Event,
        progress: Progress = lambda done, total: None,
    ) -> dict[str, Any]:
        """The fields of `eval_finished`.

        Raises `EvaluationFailed` or `DeadlineExceeded` for good, `Retryable` after a stop.
        """
        if not plan.problems:
            raise EvaluationFailed(f"all {plan.num_skipped} prompts of {plan.suite} are too long")
        file = self._open(plan)
        todo = [problem for problem in plan.problems if problem.row not in file.results]
        asking = {"request_s": self._config.request_s, "retry_s": self._config.retry_s}
        pinned = PinnedSampler(self._http, plan, sampler, **asking)
        grading = Graders(self._http, plan, graders, **asking)

        async def evaluate(problem: Problem) -> None:
            completions = await pinned.sample(problem)
            cuts = _cuts(plan, completions)
            texts = [one.text for one in completions] + [cut.text for cut in cuts]
            outcomes = await grading.grade(problem, texts)
            result = _result(plan, problem, completions, outcomes, cuts)
            file.add(result)
            for sample in result.samples:
                self._samples.labels(sample.outcome.kind).inc()
            progress(len(file.results), len(plan.problems))

        progress(len(file.results), len(plan.problems))
        await _each(todo, evaluate, at_a_time=self._at_a_time(plan), stop=stop)
        if len(file.results) < len(plan.problems):
            raise Retryable(f"stopped after {len(file.results)} of {len(plan.problems)} problems")
        return self._finish(plan, file)

    def _open(self, plan: Plan) -> SampleFile:
        return SampleFile(plan.file_stem(self._runs_dir), plan, now_s=now_s())

    def _at_a_time(self, plan: Plan) -> int:
        """Problems whose samples keep the server full."""
        in_flight = min(self._config.samples_in_flight, plan.max_running_requests)
        return math.ceil(in_flight / plan.samples_per_problem)

    def _finish(self, plan: Plan, file: SampleFile) -> dict[str, Any]:
        seconds = now_s() - file.began_at_s
        summary = summarise(plan, file.finish(), seconds=seconds)
        write_summary(file.path.with_suffix(".json"), summary)
        self._seconds.observe(seconds)
        log.info(
            "evaluation_finished",
            eval_id=plan.eval_id,
            policy_version=plan.policy_version,
            pass_at_1=summary["pass_at_k"]["1"],
            seconds=summary["seconds"],
        )
        return summary


@dataclass(frozen=True, slots=True)
class _Cut:
    """What of sample `index` a smaller budget would have left."""

    index: int
    budget: int
    text: str


def _cuts(plan: Plan, completions: Sequence[Completion]) -> list[_Cut]:
    return [
        _Cut(index, budget, plan.tokenizer.decode(one.token_ids[:budget]))
        for index, one in enumerate(completions)
        for budget in plan.budgets
        if len(one.token_ids) > budget
    ]


def _result(
    plan: Plan,
    problem: Problem,
    completions: Sequence[Completion],
    outcomes: Sequence[Outcome],
    cuts: Sequence[_Cut],
) -> ProblemResult:
    """`outcomes` are of the completions, then of the cuts."""
    cut_outcomes: list[dict[int, Outcome]] = [{} for _ in completions]
    for cut, outcome in zip(cuts, outcomes[len(completions) :], strict=True):
        cut_outcomes[cut.index][cut.budget] = outcome
    return ProblemResult(
        row=problem.row,
        source=problem.source,
        prompt=problem.prompt,
        gold=problem.gold,
        policy_version=plan.policy_version,
        samples=[
            GradedSample(
                text=one.text,
                token_ids=one.token_ids,
                finish_reason=one.finish_reason,
                outcome=outcomes[index],
                cut=cut_outcomes[index],
            )
            for index, one in enumerate(completions)
        ],
    )


async def _each(
    problems: Sequence[Problem],
    handle: Callable[[Problem], Awaitable[None]],
    *,
    at_a_time: int,
    stop: asyncio.Event,
) -> None:
    """Handle problems, several at a time; after a stop none is begun. The first error ends all."""
    waiting = iter(problems)

    async def work() -> None:
        for problem in waiting:
            if stop.is_set():
                return
            await handle(problem)

    workers = {asyncio.create_task(work()) for _ in range(at_a_time)}
    try:
        for finished in asyncio.as_completed(workers):
            await finished
    finally:
        await asyncio.gather(*(end(worker) for worker in workers))
