"""Who is right where servers come to different effective checksums of one version: what was
published decides. The ranks digest it when it is first asked for, and the store keeps their word.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from services.trainer.disk import Unwritable
from services.trainer.pausing import JobPaused
from services.trainer.versions import VersionStore
from shared.errors import TandemError

log = structlog.get_logger()


class Undecided(TandemError):
    """The ranks cannot say what was published."""


class Arbiter:
    """`digest(folder)` has the ranks compute the effective checksum of a whole version."""

    def __init__(self, store: VersionStore, digest: Callable[[Path], Awaitable[str]]) -> None:
        self._store, self._digest = store, digest
        self._alone = asyncio.Lock()
        self._in_vain: dict[int, str] = {}  # versions that give no answer, and why

    async def word(self, version: int) -> str:
        """The effective checksum of what was published; `Undecided` if it cannot be had, and
        `Unwritable` where a full disk is why.

        It may take as long as the ranks are at something else.
        """
        async with self._alone:
            if (settled := self._store.settled(version)) is not None:
                return settled
            if version in self._in_vain:
                raise Undecided(self._in_vain[version])
            try:
                word = await self._ask(version)
            except Unwritable:
                raise
            except (TandemError, ValueError) as err:
                text = f"what was published as version {version} cannot be digested: {err}"
                if not isinstance(err, JobPaused):  # new ranks were asked often enough
                    self._in_vain[version] = text
                raise Undecided(text) from err
            self._store.settle(version, word)
            log.info("checksum_settled", policy_version=version, effective_checksum=word)
            return word

    async def _ask(self, version: int) -> str:
        async with self._store.lending([version]) as lent:
            return await self._digest(lent[version])
