"""What a conversion of checkpoints is asked for, and what it tells while it runs.

The converter writes one event a line, as JSON, to its standard output; the last is `Finished` or
`Failed`. A converter that ends without either was killed: started again, it goes on where it was.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

ConversionTarget = Literal["bf16", "fp8", "fp4", "fp32", "transformers", "torch_dist"]
"""A release in one of four formats, or unquantised weights in another layout: transformers' names,
or a Megatron torch_dist directory that the actor loads."""


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Planned(_Event):
    """Everything is checked; nothing is written yet."""

    event: Literal["planned"] = "planned"
    source: str = Field(description="what the source is, in words")
    num_tensors: int
    num_shards: int
    total_bytes: int
    kept_bytes: int = Field(description="of shards that an interrupted run has finished")
    notes: list[str] = Field(default_factory=list, description="sentences for people")


class Progressed(_Event):
    event: Literal["progressed"] = "progressed"
    done_bytes: int = Field(description="kept ones included")
    num_shards_done: int
    tensor: str


class Finished(_Event):
    event: Literal["finished"] = "finished"
    path: str
    num_bytes: int
    seconds: float
    already_there: bool = False


class Failed(_Event):
    """`error` is a sentence for people."""

    event: Literal["failed"] = "failed"
    error: str


ConversionEvent = Annotated[Planned | Progressed | Finished | Failed, Field(discriminator="event")]
_EVENTS: TypeAdapter[ConversionEvent] = TypeAdapter(ConversionEvent)


def read_event(line: str | bytes) -> ConversionEvent:
    """One line of a converter's output; pydantic's ValidationError if it is none."""
    return _EVENTS.validate_json(line)
