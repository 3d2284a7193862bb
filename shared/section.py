"""What every part of a job document has in common: strict, frozen, unknown keys are errors."""

import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, field_validator

# A literal value, or one environment variable whose name begins with SITE_: a job cannot read any
# other variable of the machines it runs on.
SiteValue = Annotated[str, StringConstraints(pattern=r"^(\$SITE_[A-Z0-9_]+|[A-Za-z0-9_.:,=^-]+)$")]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # "8" and true are no numbers
        allow_inf_nan=False,  # JSON has neither: such a job could not be stored
        use_attribute_docstrings=True,
    )

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: object) -> object:
        if isinstance(value, str):
            value.encode()  # half a character, which JSON can spell, is a ValueError
        return value


def site_value(text: str) -> str:
    """`text`, or what this machine has for it; an unset variable is a ValueError that names it."""
    if not text.startswith("$"):
        return text
    try:
        return os.environ[text[1:]]
    except KeyError as err:
        raise ValueError(f"{text}: this machine's environment does not set it") from err
