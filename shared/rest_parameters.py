"""Parameters that paths of several services have: one bound and one description for each."""

from typing import Annotated

from fastapi import Path

MAX_ID_CHARS = 200
MAX_NUMBER = 2**53  # every JSON reader holds whole numbers up to here exactly

JobId = Annotated[
    str,
    Path(
        max_length=MAX_ID_CHARS,
        description="the job's name, as its submission was answered",
        examples=["sums-1f3a"],
    ),
]
Version = Annotated[
    int,
    Path(ge=0, le=MAX_NUMBER, description="a policy version; 0 is the policy as it was given"),
]
