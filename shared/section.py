"""What every part of a job document has in common: strict, frozen, unknown keys are errors."""

from pydantic import BaseModel, ConfigDict, field_validator


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
