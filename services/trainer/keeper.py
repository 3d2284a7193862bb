"""The trained policy as the books have it: ranks that are restarted and replayed when they die.

    newest checkpoint ──> + redo log ──> the state after the last durable batch

Whoever asks gets an answer of ranks in that state, or an error that ends the job.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from services.trainer.books import Books
from services.trainer.checkpoint_folder import (
    CHECKPOINTS,
    COMPLETE_FILE,
    add_books,
    complete_checkpoints,
    settle,
)
from services.trainer.disk import Unwritable, has_room
from services.trainer.events import EventLog, EventMaker
from services.trainer.pausing import JobPaused
from services.trainer.ranks import RankSet, RanksLost, RanksStalled
from shared.errors import LeftHalfway, Rejected, RemoteError, TandemError, WeightsCorrupt
from shared.messages import TrainingSample
from shared.parity.trace import TraceRounding
from shared.tasks import end, first_of, to_the_end
from shared.telemetry import counter
from shared.weights.protocol import GroupTransfer

log = structlog.get_logger()
T = TypeVar("T")
StartRanks = Callable[[], Awaitable[RankSet]]
MAX_RESTARTS_IN_A_ROW = 3
ROOM_OF_LOGS_BYTES = 1 << 20  # with less, ranks can be expected to die again
STOP_S = 30.0  # that ranks may take to be gone while they come up


class StepRefused(TandemError):
    """The ranks would not train a batch; their weights are as before.

    Ranks that had begun to train it are ended: new ones come back from checkpoint and redo log.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step} was refused: {reason}")
        self.step = step


class LeftForPause(JobPaused, RanksLost):
    """A pause was asked for while there were no ranks in the right state: it is obeyed at once.

    For the job it is a pause; for whoever asks the ranks beside it they are gone.
    """

    def __init__(self) -> None:
        super().__init__("paused on request", on_request=True)


class RankKeeper:
    def __init__(
        self,
        start_ranks: StartRanks,
        *,
        books: Books,
        run_dir: Path,
        keep_checkpoints: int,
        keep_every: int | None = None,
        reference_step: int | None = None,
        record: EventLog,
        events: EventMaker,
    ) -> None:
        """`reference_step`: the checkpoint of that step has the reference policy, and stays."""
        self._start_ranks = start_ranks
        self._books = books
        self._run_dir = run_dir
        self._checkpoints = run_dir / CHECKPOINTS
        self._keep_checkpoints = keep_checkpoints
        self._keep_every = keep_every
        self.reference_step = reference_step
        self._unfinished: tuple[int, float] | None = None  # step being saved, since when
        self._record = record
        self._events = events
        self._ranks: RankSet | None = None
        self._held: int | None = None  # the step whose weights they have, while that is certain
        self._is_closed = False
        self._full: Unwritable | None = None  # a checkpoint met it: the job is to pause
        self._restarts = 0
        self._lost = counter("trainer_rank_restarts_total", "Times that the ranks were lost.")
        self._turn = asyncio.Lock()
        self.pause_asked = asyncio.Event()  # the job's: obeyed here as long as ranks come up
        self.owners: list[str] = []  # where ranks serve their parts of versions
        self.replayed: dict[int, dict[str, Any]] = {}  # what a replay answered, by step
        self.logprobs = b""  # FP32 of all response tokens of the step that `train` took, before it

    async def restore(self) -> None:
        """Bring ranks up in the state after the last durable batch."""
        async with self._turn:
            await self._insist(lambda _: _nothing())

    async def train(self, step: int) -> dict[str, Any]:
        """Take `step`, whose batch is in the redo log; a replay may have taken it already.

        The answer is empty where only a checkpoint is left of the step. Raises `StepRefused` when
        the ranks will not take it.
        """

        async def take(ranks: RankSet) -> dict[str, Any]:
            if step in self.replayed:
                return self.replayed[step]
            if self._held is not None and step <= self._held:
                log.warning("step_result_lost", step=step, held=self._held)
                self.logprobs = b""
                return {}
            body = await asyncio.to_thread(self._books.redo_body, step)
            return await self._train(ranks, step, body)

        async with self._turn:
            result = await self._insist(take)
        self._restarts = 0
        return result

    async def export(
        self, policy_version: int, path: Path, base: Path | None = None
    ) -> dict[str, Any]:
        async with self._turn:
            answer = await self._insist(lambda ranks: ranks.export(policy_version, path, base))
        self.owners = list(answer.get("owners", ()))
        return answer

    async def send(self, path: Path, groups: Sequence[GroupTransfer]) -> str:
        """Broadcast an exported version to servers; what went wrong, or nothing."""
        async with self._turn:
            return await self._insist(lambda ranks: ranks.send(path, groups))

    async def effective_checksum(self, path: Path) -> str:
        """Of a whole version that was published in `path`."""
        async with self._turn:
            return await self._insist(lambda ranks: ranks.effective_checksum(path))

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        rounding: TraceRounding = "own",
        check: Callable[[int], object] = lambda _: None,
    ) -> list[list[float]]:
        """Log-probabilities [T - 1] of each sequence.

        `check` is given the step that is held, once for all ranks that are asked: new ones may
        have taken the newest batch. It is the same in `trace` and `climb`.
        """

        async def ask(ranks: RankSet) -> list[list[float]]:
            check(self._held_step)
            return await ranks.score(sequences, temperature, rounding)

        async with self._turn:
            return await self._insist(ask)

    async def trace(self, request: bytes, *, check: Callable[[int], int] = lambda _: 0) -> bytes:
        """Inner states as a packed `Traced`; `check` says which version the held step made."""

        async def ask(ranks: RankSet) -> bytes:
            return await ranks.trace(request, check(self._held_step))

        async with self._turn:
            return await self._insist(ask)

    async def climb(
        self, choose: Callable[[int], Awaitable["Climbers"]], *, temperature: float
    ) -> dict[str, list[float]]:
        """Log p of all response tokens by rung of the attribution; `choose` is given the step that
        is held, which decides which other versions are needed."""

        async def ask(ranks: RankSet) -> dict[str, list[float]]:
            chosen = await choose(self._held_step)
            samples = [one.pack() for one in chosen.samples]
            return await ranks.climb(samples, temperature, chosen.folders)

        async with self._turn:
            return await self._insist(ask)

    async def spans(self, max_spans: int) -> list[dict[str, Any]]:
        """For a profile: what each rank did. Ranks that were lost meanwhile have nothing to say."""
        async with self._turn:
            return await self._insist(lambda ranks: ranks.spans(max_spans))

    async def save(self, step: int, *, wait: bool = True) -> None:
        """Write a checkpoint, in the background unless `wait`. Once it is there, older ones, and
        batches before the oldest kept, may go."""
        path = self._path(step)

        async def write(ranks: RankSet) -> dict[str, Any]:
            await asyncio.to_thread(add_books, self._books, path)
            return await ranks.save(step, path, wait=wait)

        self._unfinished = (step, time.monotonic())
        async with self._turn:
            await self._insist(write)

    async def save_reference(self) -> None:
        """Have the reference policy's checkpoint before any later step is taken."""
        step = self.reference_step
        if step is not None and step not in dict(self.complete_checkpoints()):
            await self.save(step)

    async def save_if_newer(self, step: int) -> None:
        """Save what the ranks hold if that is `step`, unless a checkpoint has it."""
        newest = max((saved for saved, _ in self.complete_checkpoints()), default=0)
        if self._held == step > newest:
            await self.save(step)

    async def close(self) -> None:
        """End the ranks for good; whoever still waits for them is told `RanksLost`."""
        self._is_closed = True
        await self._drop_ranks()
        await self._note_saved()

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and directory, oldest first; half-written ones are none."""
        return complete_checkpoints(self._run_dir)

    async def _insist(self, ask: Callable[[RankSet], Awaitable[T]]) -> T:
        """Ask ranks in the right state, starting new ones as often as is reasonable. A checkpoint
        that found no room is told to whoever asks next, and after that."""
        while True:
            if self._is_closed:
                raise RanksLost("the job is ending")
            if self._full is not None:
                raise self._full
            try:
                if self._held is None:
                    await self._drop_ranks()
                if self._ranks is None:
                    await self._bring_up()
                assert self._ranks is not None
                answer = await ask(self._ranks)
            except LeftForPause:
                raise
            except RemoteError as err:
                if err.kind != Unwritable.__name__:
                    raise
                self._full = Unwritable(err.text)
            except RanksLost as err:
                await self._drop_ranks()
                self._restarts += 1
                self._lost.inc()
                if isinstance(err, RanksStalled):
                    self._record.note(self._events("ranks_stalled", **err.diagnosis.document()))
                log.warning("ranks_lost", error=str(err), restarts_in_a_row=self._restarts)
                if not has_room(self._run_dir, ROOM_OF_LOGS_BYTES):
                    raise Unwritable.at(self._run_dir, err) from err
                if self._restarts > MAX_RESTARTS_IN_A_ROW or self._is_closed:
                    raise
                self._record.note(self._events("rank_restarted", error=str(err)))
            else:
                await self._note_saved()
                return answer

    @property
    def _held_step(self) -> int:
        """Of ranks that are being asked."""
        assert self._held is not None
        return self._held

    async def _note_saved(self) -> None:
        """Ranks put a checkpoint in place when all of them have written it."""
        if (
            self._unfinished is None
            or not (self._path(self._unfinished[0]) / COMPLETE_FILE).exists()
        ):
            return
        (step, began_s), self._unfinished = self._unfinished, None
        seconds = time.monotonic() - began_s
        self._record.note(self._events("checkpoint_saved", step=step, seconds=seconds))
        await asyncio.to_thread(self._forget_older)

    def _path(self, step: int) -> Path:
        return self._checkpoints / f"step{step:08d}"

    async def _drop_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        self._held = None
        self.owners = []
        if ranks is not None:
            await ranks.stop()

    async def _bring_up(self) -> None:
        """New ranks, unless a pause is asked for before they are in the right state: those that
        were begun are stopped, and what they had replayed is replayed when the job goes on."""
        coming = asyncio.create_task(self._start_and_replay(), name="ranks come up")
        try:
            await first_of(coming, self.pause_asked)
            if not coming.done():
                raise LeftForPause
            coming.result()
        finally:
            await to_the_end(end(coming, within_s=STOP_S))

    async def _start_and_replay(self) -> None:
        """New ranks are ours only once they are in the right state."""
        self._unfinished = None
        await asyncio.to_thread(settle, self._run_dir)
        for step, path in [*reversed(self.complete_checkpoints()), (0, None)]:
            missing = self._books.redo_steps(step)  # raises before anything is started
            ranks = await self._start_ranks()
            try:
                if path is None or await self._loads(ranks, path, step):
                    self._held = step
                    await self._replay(ranks, missing)
                    self._ranks = ranks
                    return
            except StepRefused:  # of the newest batch
                if self._held is not None:  # they are where they were before it
                    self._ranks = ranks
                raise
            finally:
                if self._ranks is not ranks:
                    self._held = None
                    await to_the_end(ranks.stop())

    async def _loads(self, ranks: RankSet, path: Path, step: int) -> bool:
        reference = None
        if self.reference_step is not None and step > self.reference_step:
            reference = self._path(self.reference_step)
        try:
            loaded = await ranks.load(path, reference)
        except (RemoteError, WeightsCorrupt, Rejected, ValueError) as err:
            error = str(err)
        else:
            if loaded == step:
                return True
            error = f"it holds step {loaded}"
        log.warning("checkpoint_refused", path=str(path), error=error)
        self._record.note(self._events("checkpoint_refused", step=step, error=error))
        return False

    async def _replay(self, ranks: RankSet, steps: Sequence[int]) -> None:
        self.replayed = {}
        taken = {
            made.step
            for made in self._books.steps(min(steps, default=1))
            if made.result is not None
        }
        for step in steps:
            body = await asyncio.to_thread(self._books.redo_body, step)
            self.replayed[step] = await self._train(ranks, step, body, is_replay=step in taken)
        if steps:
            log.info("steps_replayed", first=steps[0], last=steps[-1])
            self._record.note(self._events("replayed", steps=list(steps)))

    async def _train(
        self, ranks: RankSet, step: int, body: bytes, *, is_replay: bool = False
    ) -> dict[str, Any]:
        """What they hold is certain again once they have answered, whoever waits for it."""
        self._held = None
        self.logprobs = b""
        try:
            result = await ranks.train_step(body, is_replay=is_replay)
        except Rejected as err:
            if not isinstance(err, LeftHalfway):
                self._held = step - 1
            raise StepRefused(step, str(err)) from err
        self._held = step
        self.logprobs = result.pop("logprobs", b"")
        return result

    def _forget_older(self) -> None:
        complete = self.complete_checkpoints()
        for step, path in complete[: -self._keep_checkpoints]:
            is_kept = self._keep_every is not None and step % self._keep_every == 0
            if is_kept or step == self.reference_step:
                continue
            (path / COMPLETE_FILE).unlink()  # first: half of it is no checkpoint
            shutil.rmtree(path)
        self._books.trim_redo(complete[-self._keep_checkpoints :][0][0])


class Climbers(NamedTuple):
    """Samples, and where the versions that sampled them are, but for the one held."""

    samples: list[TrainingSample]
    folders: Mapping[int, Path]


async def _nothing() -> None:
    return None
