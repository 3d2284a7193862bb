"""What one evaluation does, worked out beforehand: problems in tokens, seeds, limits.

A plan is a function of its request, so an evaluation that is taken up again asks for the same
samples under the same seeds.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shared.chat import encode_prompt
from shared.data import Row, load_rows
from shared.errors import TandemError
from shared.job import Job, expand_path
from shared.job_eval import SuiteSection
from shared.messages import EvalRequested, SamplingParams
from shared.tokenizer import CheckpointTokenizer


class EvaluationFailed(TandemError):
    """It cannot be finished, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a suite as the policy gets it; `prompt` shows control tokens by name."""

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
    max_prompt_tokens: int  # what the response leaves of the context
    shortest_skipped: int  # tokens; 0 where none was skipped
    samples_per_problem: int
    sampling: SamplingParams
    grader: str
    grading_timeout_s: float
    seed: int
    deadline_s: float
    max_running_requests: int
    budgets: list[int]  # below sampling.max_response_tokens, rising
    tokenizer: CheckpointTokenizer

    @property
    def asked(self) -> dict[str, Any]:
        """How its problems are asked; figures of two versions compare where this is equal."""
        return {
            **self.sampling.model_dump(mode="json"),
            "samples_per_problem": self.samples_per_problem,
            "grader": self.grader,
        }

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its response together."""
        longest = max((len(problem.token_ids) for problem in self.problems), default=1)
        return longest + self.sampling.max_response_tokens

    @property
    def emptiness(self) -> str:
        """Why it has no problem left: which limit, and by how much."""
        limit, response = self.max_prompt_tokens, self.sampling.max_response_tokens
        return (
            f"all {self.num_skipped} prompts of {self.suite} are too long: the shortest has "
            f"{self.shortest_skipped} tokens, and context_length {limit + response} - "
            f"max_response_tokens {response} leaves {limit} for a prompt"
        )

    def file_stem(self, runs_dir: Path) -> Path:
        """Where the samples go, without suffix."""
        return runs_dir / self.job_id / "evals" / self.stem

    def seed_of(self, problem: Problem, index: int) -> int:
        """Of its sample `index`; 53 bits, so that it stays exact in JSON."""
        text = f"{self.seed}/{self.policy_version}/{problem.row}/{index}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 11


@dataclass(frozen=True, slots=True)
class Policy:
    """What an evaluation must know of the policy and of its server."""

    checkpoint: Path  # architecture and tokenizer
    context_length: int
    max_running_requests: int
    grading_timeout_s: float

    @classmethod
    def of_job(cls, job: Job) -> "Policy":
        return cls(
            checkpoint=expand_path(job.model.rollout_checkpoint),
            context_length=job.sampling.context_length,
            max_running_requests=job.rollout.max_running_requests,
            grading_timeout_s=job.reward.timeout_s,
        )


def plans_of_job(request: EvalRequested, job: Job) -> list[Plan]:
    """A plan for each suite of a job's own evaluation, the job's first suite last; blocks.

    What the first suite says ends the lease, so it comes when the others are done.
    """
    if job.eval is None:
        raise EvaluationFailed(f"{request.eval_id}: job {job.name} has no eval section")
    stem = f"v{request.policy_version:08d}"
    first, *others = job.eval.suites
    named = [(one, f".{suite_slug(one.suite)}") for one in others]
    return [
        make_plan(
            section,
            Policy.of_job(job),
            eval_id=request.eval_id + name,
            job_id=request.job_id,
            stem=stem + name,
            policy_version=request.policy_version,
            step=request.step,
            seed=job.seed,
            deadline_s=request.deadline_s,
        )
        for section, name in [*named, (first, "")]
    ]


def suite_slug(suite: str) -> str:
    """A suite's name as part of a file name: 'AIME 2025' is 'AIME-2025'."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", suite).strip("-")[:60] or "suite"


def make_plan(
    section: SuiteSection,
    policy: Policy,
    *,
    eval_id: str,
    job_id: str,
    stem: str,
    policy_version: int,
    step: int,
    seed: int,
    deadline_s: float,
) -> Plan:
    """Read the suite and encode its prompts as the policy reads them; blocks.

    A prompt that leaves no room for the response in the context is skipped and counted.
    Raises `DataError` for an unusable suite, OSError for a checkpoint without tokenizer, and
    `EvaluationFailed` for a chat format that the tokenizer does not have.
    """
    tokenizer = CheckpointTokenizer.load(policy.checkpoint)
    rows = load_rows(section.data)[: section.max_problems]
    limit = policy.context_length - section.max_response_tokens
    encoded = list(_encoded(rows, section, tokenizer))
    problems = [one for one in encoded if len(one.token_ids) <= limit]
    skipped = [len(one.token_ids) for one in encoded if len(one.token_ids) > limit]
    return Plan(
        eval_id=eval_id,
        job_id=job_id,
        stem=stem,
        suite=section.suite,
        policy_version=policy_version,
        step=step,
        problems=problems,
        num_skipped=len(skipped),
        max_prompt_tokens=limit,
        shortest_skipped=min(skipped, default=0),
        samples_per_problem=section.samples_per_problem,
        sampling=SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            frequency_penalty=section.frequency_penalty,
            presence_penalty=section.presence_penalty,
            repetition_penalty=section.repetition_penalty,
            max_response_tokens=section.max_response_tokens,
            stop_token_ids=list(tokenizer.stop_token_ids),
        ),
        grader=section.grader,
        grading_timeout_s=policy.grading_timeout_s,
        seed=seed,
        deadline_s=deadline_s,
        max_running_requests=policy.max_running_requests,
        budgets=sorted({b for b in section.budgets if b < section.max_response_tokens}),
        tokenizer=tokenizer,
    )


def _encoded(
    rows: Iterable[Row], section: SuiteSection, tokenizer: CheckpointTokenizer
) -> Iterable[Problem]:
    data = section.data
    for row in rows:
        try:
            prompt = encode_prompt(
                row.prompt,
                prompt_format=data.prompt_format,
                tokenizer=tokenizer,
                system=data.system,
            )
        except ValueError as err:
            raise EvaluationFailed(f"{section.suite}: {err}") from err
        yield Problem(row.index, row.source, prompt.text, prompt.token_ids, row.gold)
