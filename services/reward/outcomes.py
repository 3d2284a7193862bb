"""Outcomes that somebody else made, a plug-in or a remote grader: read, or an error that says why
they are none. What is read wrong costs its own response and no other."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.messages import GraderError, Outcome
from shared.refusals import fault

_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def read_outcome(made: Any) -> Outcome:
    """Example of an error's reason: 'no outcome: score: value 1.7e+308 is beyond the bound …'."""
    try:
        return _OUTCOME.validate_python(made)
    except ValidationError as err:
        return GraderError(reason=f"no outcome: {fault(err)}"[:300])
