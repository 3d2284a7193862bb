"""The job's `warm_up` section: supervised steps from prompt and response pairs before sampling."""

from pydantic import Field

from shared.section import Section


class WarmUpSection(Section):
    """First steps on given responses, before the policy's own are rewarded."""

    path: str
    """JSONL or parquet file with `prompt` and `response` in each row; `$DATA_ROOT` and other
    variables are expanded. Prompts are asked as `data.prompt_template` and its format say."""
    steps: int = Field(gt=0)
    """The first so many of the job's steps."""
    pairs_per_step: int = Field(16, gt=0)
    """Prompt and answer pairs of one supervised step."""
    learning_rate: float | None = Field(None, gt=0)
    """Default: `actor.optimizer.learning_rate`."""
