"""Carry out one plan: draw each sample, judge it, keep both, and sum up at the end.

        plan ──> samples not kept yet ──> draw (pinned) ──> keep ──> grade ──> keep ──┐
                      many at a time ─────────────────────────────────────────────────┴─> summary

Each sample is a request of its own, so whoever takes the evaluation up again asks for what is
missing: one that was drawn is never drawn again, one that was judged is not judged again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from services.evaluator.config import RunnerConfig
from services.evaluator.plan import EvaluationFailed, Plan, Problem
from services.evaluator.results import summarise
from services.evaluator.sample_file import Drawn, Judged, SampleFile
from services.evaluator.samples import write_summary
from services.evaluator.servers import Address, Graders, PinnedSampler
from shared.errors import Retryable
from shared.http import HttpClient
from shared.spans import span
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
            raise EvaluationFailed(plan.emptiness)
        file = await asyncio.to_thread(self._open, plan)
        asking = {"request_s": self._config.request_s, "retry_s": self._config.retry_s}
        pinned = PinnedSampler(self._http, plan, sampler, **asking)
        grading = Graders(self._http, plan, graders, **asking)

        async def evaluate(todo: tuple[Problem, int]) -> None:
            problem, index = todo
            if (drawn := file.drawn.get((problem.row, index))) is None:
                with span("sample", "problems", row=problem.row):
                    drawn = await _draw(pinned, plan, problem, index)
                file.add(drawn)
            with span("grade", "problems", row=problem.row):
                judged = await _judge(grading, plan, problem, drawn)
            file.add(judged)
            self._samples.labels(judged.outcome.kind).inc()
            progress(file.num_finished, len(plan.problems))

        progress(file.num_finished, len(plan.problems))
        await _each(_todo(plan, file), evaluate, at_a_time=self._at_a_time(plan), stop=stop)
        if file.num_finished < len(plan.problems):
            raise Retryable(f"stopped after {file.num_finished} of {len(plan.problems)} problems")
        return await asyncio.to_thread(self._finish, plan, file)

    def _open(self, plan: Plan) -> SampleFile:
        return SampleFile(plan.file_stem(self._runs_dir), plan, now_s=now_s())

    def _at_a_time(self, plan: Plan) -> int:
        """Samples that keep the server full."""
        return min(self._config.samples_in_flight, plan.max_running_requests)

    def _finish(self, plan: Plan, file: SampleFile) -> dict[str, Any]:
        """Blocks: intervals of every k and budget take seconds of a large suite."""
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


def _todo(plan: Plan, file: SampleFile) -> list[tuple[Problem, int]]:
    """What is not judged yet; the samples of a problem follow each other."""
    return [
        (problem, index)
        for problem in plan.problems
        for index in range(plan.samples_per_problem)
        if (problem.row, index) not in file.judged
    ]


async def _draw(pinned: PinnedSampler, plan: Plan, problem: Problem, index: int) -> Drawn:
    completion = await pinned.sample(problem, index)
    return Drawn(
        row=problem.row,
        index=index,
        policy_version=plan.policy_version,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
    )


async def _judge(grading: Graders, plan: Plan, problem: Problem, drawn: Drawn) -> Judged:
    """The whole sample, and what each smaller budget would have left of it."""
    budgets = [budget for budget in plan.budgets if budget < len(drawn.token_ids)]
    cuts = [plan.tokenizer.decode(drawn.token_ids[:budget]) for budget in budgets]
    outcome, *of_cuts = await grading.grade(problem, [drawn.text, *cuts])
    cut = dict(zip(budgets, of_cuts, strict=True))
    return Judged(row=drawn.row, index=drawn.index, outcome=outcome, cut=cut)


async def _each(
    todo: Sequence[tuple[Problem, int]],
    handle: Callable[[tuple[Problem, int]], Awaitable[None]],
    *,
    at_a_time: int,
    stop: asyncio.Event,
) -> None:
    """Handle samples, many at a time; after a stop none is begun. The first error ends all."""
    waiting = iter(todo)

    async def work() -> None:
        for one in waiting:
            if stop.is_set():
                return
            await handle(one)

    workers = {asyncio.create_task(work()) for _ in range(at_a_time)}
    try:
        for finished in asyncio.as_completed(workers):
            await finished
    finally:
        await asyncio.gather(*(end(worker) for worker in workers))
