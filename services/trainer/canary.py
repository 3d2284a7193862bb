"""Who may load a version that no server has accepted yet: one server at a time, the canary.

The server that refused it (probe, checksum) is asked again, and nobody else loads it meanwhile.
Another one's turn comes only once that server is gone, is to serve something else, or stopped
answering: then nobody knows whether the version or the server is at fault. (One that
comes to other values than were published is forgotten: of that everybody knows.)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from services.trainer.transactions import is_refusal
from shared.errors import TandemError


class LeftToCanary(TandemError):
    """Another server has refused the version, and is asked again first."""


class Canary:
    """`is_asked(name, version)`: whether that server is there and is to serve the version."""

    def __init__(self, is_asked: Callable[[str, int], bool]) -> None:
        self._is_asked = is_asked
        self._refused_by: dict[int, str] = {}  # version -> server
        self._alone = asyncio.Lock()

    def of(self, version: int) -> str | None:
        """The server that has refused the version and alone may try it again."""
        name = self._refused_by.get(version)
        return name if name is not None and self._is_asked(name, version) else None

    def is_left_to_another(self, version: int, name: str) -> bool:
        return self.of(version) not in (None, name)

    @asynccontextmanager
    async def turn(self, version: int, name: str, *, loads: bool) -> AsyncIterator[None]:
        """Alone in the block. Raises `LeftToCanary` for who `loads` what another one refused."""
        async with self._alone:
            if loads and self.is_left_to_another(version, name):
                raise LeftToCanary(f"version {version} is tried by {self.of(version)} first")
            try:
                yield
            except TandemError as err:
                if is_refusal(err):
                    self._refused_by[version] = name
                raise
            self._refused_by.pop(version, None)

    def forget_server(self, name: str) -> None:
        """It is gone, does not answer, or is found wrong: no judge of a version any more."""
        self._refused_by = {v: by for v, by in self._refused_by.items() if by != name}

    def forget_refusals(self) -> None:
        self._refused_by.clear()

    def keep_only(self, versions: Collection[int]) -> None:
        self._refused_by = {v: by for v, by in self._refused_by.items() if v in versions}
