"""The usual suites: how their files are read, asked and graded. Data is never shipped.

A name gives defaults and nothing else; whoever evaluates names the file.
"""

from dataclasses import dataclass
from types import MappingProxyType

from shared.job_data import DataFormat
from shared.job_reward import GraderName

STEP_BY_STEP = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""The directive that the DeepSeek-R1 release recommends for mathematics ("Usage Recommendations")
and that its successors' evaluations keep."""


@dataclass(frozen=True, slots=True)
class Suite:
    """`samples_per_problem` as in the published runs; small suites need more samples."""

    format: DataFormat
    grader: GraderName
    num_problems: int
    samples_per_problem: int
    prompt_template: str = STEP_BY_STEP


SUITES = MappingProxyType(
    {
        "aime-2024": Suite("aime", "aime", 30, 8),
        "aime-2025": Suite("aime", "aime", 30, 8),
        "math-500": Suite("math500", "math", 500, 4),
        "gsm8k": Suite("gsm8k", "gsm8k", 1319, 1),
    }
)
