"""The job's `eval` section: suites that are asked of one version every so many steps."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.job_data import DataSection
from shared.job_reward import GraderName
from shared.section import Section


class SuiteSection(Section):
    """What is asked in an evaluation, how, and who grades it."""

    suite: str
    """Name shown in reports."""
    data: DataSection
    """Where the problems are."""
    samples_per_problem: int = Field(8, gt=0)
    """Answers asked for each problem; pass@k needs k of them."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Of sampling."""
    top_k: int = Field(0, ge=0)
    """0 keeps every token."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Tokens below this share of the likeliest one's probability are left out."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """This and the next two: for SGLang servers; the embedded engine refuses them."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Of sampling."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Of sampling."""
    max_response_tokens: int = Field(gt=0)
    """Of each completion."""
    budgets: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    """Smaller response budgets to report, too; the same samples cut there tell what they were."""
    grader: GraderName = "aime"
    """Name of the grader."""
    max_problems: int | None = Field(None, gt=0)
    """Only the first so many."""

    @model_validator(mode="after")
    def _budgets_are_smaller(self) -> Self:
        if (most := max(self.budgets, default=0)) > self.max_response_tokens:
            raise ValueError(
                f"budgets: {most} exceeds max_response_tokens {self.max_response_tokens}"
            )
        return self


class EvalSection(SuiteSection):
    """Evaluations while the job trains, on problems that it does not train on."""

    every_steps: int = Field(10, gt=0)
    """Steps between evaluations; before the first and after the last step there is one anyway."""
    deadline_s: float = Field(600.0, gt=0)
    """Of one evaluation, all suites; a server is not kept from training for longer."""
    server: Literal["lease", "dedicated"] = "lease"
    """`lease`: a server is taken from training for each evaluation and keeps the version until it
    is done. `dedicated`: one server does nothing but evaluations; needs two servers."""
    also: list[SuiteSection] = Field(default_factory=list)
    """Further suites, asked of the same version in the same lease."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.suite, *(one.suite for one in self.also)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"also: two suites are named {twice!r}")
        return self

    @property
    def suites(self) -> list[SuiteSection]:
        """All suites; the first is the one that curves and comparisons of a run show."""
        return [self, *self.also]
