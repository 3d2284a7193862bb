"""The policy that the ranks hold, for whoever asks about it while the job runs."""

import asyncio
from collections.abc import Sequence

from services.trainer.assembly import Parts
from services.trainer.books import Books
from shared.messages import TrainingBatch
from shared.parity.attribution import Attribution

VERSION_NOTE = "policy_version"  # of the books: set where a replay made other weights


class HeldPolicy:
    """Answers name the version of the step that the ranks held when they were asked: ranks that
    are replaced between a step's commit and its training have trained it by then."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def score(
        self, sequences: Sequence[Sequence[int]], *, temperature: float, policy_version: int | None
    ) -> tuple[int, list[list[float]]]:
        """The version that the ranks hold, and log-probabilities [T - 1] of each sequence under it.

        Raises LookupError when `policy_version` is another.
        """
        held = -1

        def check(step: int) -> None:
            nonlocal held
            held = self._held(step, policy_version)

        keeper = self._parts.keeper
        logprobs = await keeper.score(sequences, temperature=temperature, check=check)
        return held, logprobs

    async def trace(self, request: bytes, *, policy_version: int | None) -> bytes:
        """Inner states of the ranks, packed; LookupError when `policy_version` is another."""
        keeper = self._parts.keeper
        return await keeper.trace(request, check=lambda step: self._held(step, policy_version))

    async def attribute(self) -> tuple[int, int, Attribution]:
        """A step, the version held, and where |Δ log p| of the step comes from under that.

        The step is the last that was trained when asked. LookupError while there is none.
        """
        p = self._parts
        taken = {made.step for made in p.books.steps() if made.result is not None}
        steps = [step for step in p.books.redo_held() if step in taken]
        if not steps:
            raise LookupError(
                "no batch of a trained step is at hand (none was trained yet, or a checkpoint has "
                "taken its place, as at a pause): ask again after the next step"
            )
        batch = TrainingBatch.unpack(await asyncio.to_thread(p.books.redo_body, steps[-1]))
        held = -1

        def check(step: int) -> int:
            nonlocal held
            held = self._held(step, None)
            return held

        found = await p.drift.of(batch, held=check)
        return batch.step, held, found

    def _held(self, step: int, wanted: int | None) -> int:
        held = version_of(step, self._parts.books)
        if wanted not in (None, held):
            raise LookupError(f"version {held} is held, not {wanted}")
        return held


def version_of(step: int, books: Books) -> int:
    """The newest version once `step` is trained; 0 is the step before the first."""
    made = books.steps(step)[0].policy_version if step else 0
    return max(made, int(books.read_note(VERSION_NOTE) or 0))
