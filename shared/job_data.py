"""Sections of a job that name its model and its prompts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.section import Section

PromptFormat = Literal["raw", "thinking", "non_thinking"]
DataFormat = Literal["auto", "prompt", "dapo", "gsm8k", "math500", "aime", "deepmath"]


class ModelSection(Section):
    """The weights that the job begins with."""

    rollout_checkpoint: str
    """Directory in the release layout; gives the samplers their architecture and tokenizer."""
    actor_checkpoint: str | None = None
    """Where the actor's first weights come from; default: the rollout checkpoint, dequantised."""


class DataSection(Section):
    """Prompts with their gold answers: a local file or a data set."""

    path: str | None = None
    """Local JSONL or parquet file; `$DATA_ROOT` and other variables are expanded."""
    dataset: str | None = None
    """Hugging Face data set id, where there is a network."""
    split: str = "train"
    """Split of `dataset`; a local file has none."""
    format: DataFormat = "auto"
    """How a row is read; `auto` decides by the first row's keys."""
    prompt_template: str = "{problem}"
    """What the policy is asked; `{problem}` is the row's text."""
    prompt_format: PromptFormat = "raw"
    """`thinking` and `non_thinking` are DeepSeek-V4's chat format; `raw` is the template alone."""
    system: str = ""
    """The chat formats' system prompt."""
    shuffle: bool = True
    """Draw rows in an order given by the job's seed, anew each epoch."""
    max_rows: int | None = Field(None, gt=0)
    """Use only the first rows of the file."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give either path or dataset")
        if "{problem}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} lacks {{problem}}")
        if self.system and self.prompt_format == "raw":
            raise ValueError("a system prompt needs a chat format, prompt_format is raw")
        return self
