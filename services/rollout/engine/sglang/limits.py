"""How long a step of several calls may take altogether, whatever each of them does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.errors import DeadlineExceeded

_GRACE_S = 10.0  # for the call that is late to say so itself, and to close what it opened


@dataclass(frozen=True, slots=True)
class Limit:
    """`seconds` for `what`, from when this was made."""

    what: str
    seconds: float
    ends_s: float

    @classmethod
    def of(cls, what: str, seconds: float) -> "Limit":
        return cls(what, seconds, time.monotonic() + seconds)

    def left_s(self) -> float:
        """For the next call; DeadlineExceeded when nothing is left."""
        left_s = self.ends_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(self.what, self.seconds)
        return left_s

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """What runs within is cancelled, and DeadlineExceeded raised, when the limit is over."""
        ends = asyncio.timeout(self.left_s() + _GRACE_S)
        try:
            async with ends:
                yield
        except TimeoutError as err:
            if not ends.expired():
                raise
            raise DeadlineExceeded(self.what, self.seconds) from err
