"""What one evaluation does, worked out beforehand: problems in tokens, seeds, limits.

A plan is a function of its request, so an evaluation that is taken up again asks for the same
samples under the same seeds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from shared.data import Row, load_rows
from shared.errors import TandemError
from shared.job import EvalSection, Job, expand_path
from shared.messages import EvalRequested, SamplingParams
from shared.tokenizer import CheckpointTokenizer


class EvaluationFailed(TandemError):
    """It cannot be finished, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a suite as the policy gets it."""

    row: int
    source: str
    prompt: str
    token_ids: list[int]
    gold: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One evaluation of exactly `policy_version`; `seed` makes it repeatable."""

    eval_id: str
    job_id: str
    stem: str
    suite: str
    policy_version: int
    step: int
    problems: list[Problem]
    num_skipped: int
    samples_per_problem: int
    sampling: SamplingParams
    grader: str
    grading_timeout_s: float
    seed: int
    deadline_s: float
    max_running_requests: int

    def file_stem(self, runs_dir: Path) -> Path:
        """Where the samples go, without suffix."""
        return runs_dir / self.job_id / "evals" / self.stem

    def seed_of(self, problem: Problem) -> int:
        """53 bits, so that it stays exact in JSON."""
        text = f"{self.seed}/{self.policy_version}/{problem.row}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 11


def plan_of_job(request: EvalRequested, job: Job) -> Plan:
    """The plan of a job's own evaluation; blocks."""
    if job.eval is None:
        raise EvaluationFailed(f"{request.eval_id}: job {job.name} has no eval section")
    return make_plan(
        job.eval,
        job,
        eval_id=request.eval_id,
        job_id=request.job_id,
        stem=f"v{request.policy_version:08d}",
        policy_version=request.policy_version,
        step=request.step,
        seed=job.seed,
        deadline_s=request.deadline_s,
    )


def make_plan(
    section: EvalSection,
    job: Job,
    *,
    eval_id: str,
    job_id: str,
    stem: str,
    policy_version: int,
    step: int,
    seed: int,
    deadline_s: float,
) -> Plan:
    """Read the suite and encode its prompts as the job's policy reads them; blocks.

    A prompt that leaves no room for the response in the job's context is skipped and counted.
    Raises `DataError` for an unusable suite, OSError for a checkpoint without tokenizer.
    """
    tokenizer = CheckpointTokenizer.load(expand_path(job.model.rollout_checkpoint))
    rows = load_rows(section.data)[: section.max_problems]
    limit = job.sampling.context_length - section.max_response_tokens
    problems = [one for one in _encoded(rows, tokenizer) if len(one.token_ids) <= limit]
    return Plan(
        eval_id=eval_id,
        job_id=job_id,
        stem=stem,
        suite=section.suite,
        policy_version=policy_version,
        step=step,
        problems=problems,
        num_skipped=len(rows) - len(problems),
        samples_per_problem=section.samples_per_problem,
        sampling=SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            max_response_tokens=section.max_response_tokens,
            stop_token_ids=list(tokenizer.stop_token_ids),
        ),
        grader=section.grader,
        grading_timeout_s=job.reward.timeout_s,
        seed=seed,
        deadline_s=deadline_s,
        max_running_requests=job.rollout.max_running_requests,
    )


def _encoded(rows: Iterable[Row], tokenizer: CheckpointTokenizer) -> Iterable[Problem]:
    for row in rows:
        token_ids = tokenizer.encode(row.prompt)
        yield Problem(row.index, row.source, row.prompt, token_ids, row.gold)
