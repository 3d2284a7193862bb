"""One set of Megatron ranks: torchrun children of this process, asked through rank 0's channel.

    conductor ──channel──> rank 0 ──process group──> other ranks ──beacons──> watchdog
        └── torchrun ──starts──────────^───────────────^

One operation at a time, each with a deadline. Ranks that die, answer nothing in time or stand still
are lost as a whole: everything they started is killed, and the keeper starts a new set.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, cast

import structlog
from pydantic import Field

from services.trainer.launch import (
    ADDRESS_VARIABLE,
    LISTEN_VARIABLE,
    MARK,
    WATCHDOG_DIR,
    Launch,
    LaunchBoard,
    mark_of,
)
from services.trainer.watchdog.diagnosis import Diagnosis
from services.trainer.watchdog.watch import Watch
from shared.channel import AsyncChannel, listening
from shared.config import Part
from shared.errors import ChannelClosed, DeadlineExceeded, TandemError
from shared.job import Job
from shared.parity.trace import TraceRounding
from shared.process import die_with_parent, kill_marked, prepare_to_fork
from shared.tasks import end, to_the_end
from shared.weights.protocol import GroupTransfer

log = structlog.get_logger()
LOG_FILE = "ranks.log"
_TAIL_LINES = 8
_TORCHRUN_LINES = 60
_FAILED = "failed (exitcode: "
_GOODBYE_S = 5.0


class RanksLost(TandemError):
    """The ranks died or stopped answering."""


class RanksStalled(RanksLost):
    """They stood still; `diagnosis` says where, and who was missing."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.sentence())
        self.diagnosis = diagnosis


class RankDeadlines(Part):
    """Seconds that one operation of the ranks may take."""

    start_s: float = Field(300.0, gt=0)
    """From starting the processes until rank 0 has connected."""
    load_s: float = Field(900.0, gt=0)
    """Reading weights or a checkpoint."""
    step_s: float = Field(3600.0, gt=0)
    """One optimiser step."""
    export_s: float = Field(900.0, gt=0)
    """Writing one version of the weights, or reading one back to settle its checksum."""
    save_s: float = Field(1800.0, gt=0)
    """Writing one checkpoint."""
    score_s: float = Field(300.0, gt=0)
    """Scoring a list of sequences."""


class RankSet(Protocol):
    """What the rest of the conductor asks of the ranks. Every call may raise `RanksLost`."""

    async def load(self, path: Path, reference: Path | None = None) -> int: ...
    async def train_step(self, batch: bytes, *, is_replay: bool = False) -> dict[str, Any]: ...
    async def export(
        self, policy_version: int, path: Path, base: Path | None = None
    ) -> dict[str, Any]: ...
    async def send(self, path: Path, groups: Sequence[GroupTransfer]) -> str: ...
    async def effective_checksum(self, path: Path) -> str: ...
    async def save(self, step: int, path: Path, *, wait: bool) -> dict[str, Any]: ...
    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        rounding: TraceRounding = "own",
    ) -> list[list[float]]: ...
    async def trace(self, request: bytes, policy_version: int) -> bytes: ...
    async def climb(
        self, samples: Sequence[bytes], temperature: float, folders: Mapping[int, Path]
    ) -> dict[str, list[float]]: ...
    async def spans(self, max_spans: int) -> list[dict[str, Any]]: ...
    async def stop(self) -> None: ...


class Ranks:
    """Built by `start`; after `stop` or `RanksLost` it is of no more use."""

    def __init__(
        self,
        resources: AsyncExitStack,
        process: asyncio.subprocess.Process,
        log_path: Path,
        watch: Watch,
        board: LaunchBoard,
    ) -> None:
        self._resources = resources
        self._process = process
        self._log_path = log_path
        self._watch = watch
        self._board = board
        self._channel: AsyncChannel | None = None
        self._deadlines = RankDeadlines()
        self._stands_still = False

    @classmethod
    async def start(
        cls,
        *,
        job_id: str,
        job: Job,
        run_dir: Path,
        deadlines: RankDeadlines,
        board: LaunchBoard | None = None,
        listen: str = "127.0.0.1",
    ) -> Self:
        """Start the processes and have them load the job's first weights.

        `run_dir` is absolute. Servers reach ranks of one node where they `listen`; other nodes
        read from `board` what to start. Raises `RanksLost`, ValueError for a site value that is not
        set or a node that refuses, or what the ranks say of the weights.
        """
        mark = mark_of(run_dir, 0)
        kill_marked(MARK, mark)  # what a killed conductor may have left
        board = board or LaunchBoard()
        async with AsyncExitStack() as stack:
            listener = await stack.enter_async_context(listening())
            launch = board.post(job, run_dir)
            stack.callback(board.clear)
            watch = Watch(
                run_dir / WATCHDOG_DIR,
                num_ranks=job.layout.world,
                stall_s=job.actor.watchdog.stall_s,
            )
            process = await _spawn(launch, listener.address, listen)
            stack.push_async_callback(_gone, process)
            stack.callback(kill_marked, MARK, mark)  # runs first
            ranks = cls(stack, process, run_dir / LOG_FILE, watch, board)
            ranks._deadlines = deadlines
            await ranks._connect(listener.accept(deadlines.start_s))
            first = {"job_id": job_id, "job": job.model_dump(mode="json"), "run_dir": str(run_dir)}
            # Rank 0 connects before it has loaded anything; others, on other nodes, may come later.
            later_s = job.cluster.rendezvous.timeout_s if launch.nodes > 1 else 0.0
            patience_s = max(deadlines.start_s, later_s)
            await ranks._ask("init", first, deadlines.load_s, patience_s=patience_s)
            ranks._resources = stack.pop_all()
        return ranks

    async def load(self, path: Path, reference: Path | None = None) -> int:
        """Continue from a checkpoint, with the reference policy of another; the step it holds."""
        payload = {"path": str(path), "reference": None if reference is None else str(reference)}
        answer = await self._ask("load", payload, self._deadlines.load_s)
        return int(answer["step"])

    async def train_step(self, batch: bytes, *, is_replay: bool = False) -> dict[str, Any]:
        """Take the step of a packed `TrainingBatch`; raises `Rejected` if the ranks refuse it."""
        what = {"batch": batch, "is_replay": is_replay}
        return await self._ask("train_step", what, self._deadlines.step_s)

    async def export(
        self, policy_version: int, path: Path, base: Path | None = None
    ) -> dict[str, Any]:
        """Write the weights as they are now as version `policy_version` into `path`.

        With what changed since the version in the directory `base`.
        """
        what = {
            "policy_version": policy_version,
            "path": str(path),
            "base": None if base is None else str(base),
        }
        return await self._ask("export", what, self._deadlines.export_s)

    async def send(self, path: Path, groups: Sequence[GroupTransfer]) -> str:
        """Broadcast an exported version to servers; what went wrong, or nothing."""
        what = {"path": str(path), "groups": [one.model_dump(mode="json") for one in groups]}
        answer = await self._ask("send", what, self._deadlines.export_s)
        return str(answer["error"])

    async def effective_checksum(self, path: Path) -> str:
        """Of the whole version that is published in `path`, by ranks of this layout or another."""
        answer = await self._ask("checksum", {"path": str(path)}, self._deadlines.export_s)
        return str(answer["checksum"])

    async def save(self, step: int, path: Path, *, wait: bool) -> dict[str, Any]:
        """Write a checkpoint; unless `wait`, it may appear during a later call."""
        what = {"step": step, "path": str(path), "wait": wait}
        return await self._ask("save", what, self._deadlines.save_s)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        rounding: TraceRounding = "own",
    ) -> list[list[float]]:
        """Log-probabilities of tokens 1..T-1 of each sequence under the weights as they are now."""
        what = {
            "sequences": [list(ids) for ids in sequences],
            "temperature": temperature,
            "rounding": rounding,
        }
        answer = await self._ask("score", what, self._deadlines.score_s)
        return [[float(value) for value in row] for row in answer["logprobs"]]

    async def trace(self, request: bytes, policy_version: int) -> bytes:
        """A packed `Traced` for a packed `TraceRequest`; the version is what they hold."""
        what = {"request": request, "policy_version": policy_version}
        answer = await self._ask("trace", what, self._deadlines.score_s)
        return cast(bytes, answer["traced"])

    async def climb(
        self, samples: Sequence[bytes], temperature: float, folders: Mapping[int, Path]
    ) -> dict[str, list[float]]:
        """Log p of all response tokens of packed `TrainingSample`s, by rung of the attribution."""
        what = {
            "samples": list(samples),
            "temperature": temperature,
            "folders": [[version, str(path)] for version, path in folders.items()],
        }
        answer = await self._ask("attribute", what, self._deadlines.score_s)
        return cast(dict[str, list[float]], answer["ladder"])

    async def spans(self, max_spans: int) -> list[dict[str, Any]]:
        """Have every rank record so many spans, or none any more; what each told, in rank order."""
        answer = await self._ask("spans", {"max_spans": max_spans}, self._deadlines.score_s)
        return cast(list[dict[str, Any]], answer["ranks"])

    async def stop(self) -> None:
        """Ask them to end, then see that nothing of them is left: who is late is killed."""
        is_there = self._channel is not None and not self._channel.closed.is_set()
        if self._channel is not None and is_there and not self._stands_still:
            with contextlib.suppress(TandemError, TimeoutError):
                await self._channel.request("stop", timeout_s=_GOODBYE_S)
                await asyncio.wait_for(self._process.wait(), _GOODBYE_S)
        await self._resources.aclose()

    async def _connect(self, arrival: Any) -> None:
        """Wait for rank 0, for torchrun's end, or for a node without ranks, whichever is first."""
        accepting = asyncio.ensure_future(arrival)
        ending = asyncio.create_task(self._process.wait())
        refusing = asyncio.create_task(self._refused())
        try:
            waiting = {accepting, ending, refusing}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if refusing.done():
                raise refusing.result()
            if not accepting.done():
                raise RanksLost(f"torchrun ended with code {ending.result()}; {self._tail()}")
            self._channel = accepting.result()
        except DeadlineExceeded as err:
            raise RanksLost(f"{err}; {self._tail()}") from err
        finally:
            await end(refusing)
            await end(ending)
            await end(accepting)

    async def _ask(
        self, op: str, payload: dict[str, Any], deadline_s: float, *, patience_s: float = 0.0
    ) -> dict[str, Any]:
        """The answer, unless the ranks are lost or stand still before it comes."""
        assert self._channel is not None
        asking = asyncio.ensure_future(self._channel.request(op, payload, timeout_s=deadline_s))
        watching = asyncio.create_task(self._watch.stalled(patience_s))
        refusing = asyncio.create_task(self._refused())
        try:
            await asyncio.wait({asking, watching, refusing}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            self._stands_still = True
            if refusing.done():
                raise refusing.result()
            raise RanksStalled(watching.result())
        except (ChannelClosed, DeadlineExceeded) as err:
            raise RanksLost(f"{op}: {err}; {self._tail()}") from err
        finally:
            await end(refusing)
            await end(watching)
            await end(asking)

    async def _refused(self) -> Exception:
        """What a node without ranks means here, once there is one."""
        refusal = await self._board.refused()
        if refusal.started:
            return RanksLost(f"node {refusal.node}: {refusal.reason}")
        return ValueError(f"node {refusal.node} starts no ranks: {refusal.reason}")

    def _tail(self) -> str:
        return tail(self._log_path)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process, though this task is cancelled meanwhile, and again."""

    async def wait() -> None:
        await process.wait()

    await to_the_end(wait())


def tail(log_path: Path) -> str:
    """The end of the ranks' log, which says why they died."""
    if not log_path.exists():
        return f"{log_path} does not exist"
    lines = log_path.read_text(errors="replace").splitlines()[-_TORCHRUN_LINES:]
    # After a rank's own last words torchrun says that it failed, its own traceback, and a table.
    failed = [number for number, line in enumerate(lines) if _FAILED in line]
    last = lines[: failed[-1] + 1 if failed else None][-_TAIL_LINES:]
    return f"{log_path} ends with: " + " | ".join(line.strip() for line in last)


async def _spawn(launch: Launch, address: str, listen: str) -> asyncio.subprocess.Process:
    prepare_to_fork()
    with (Path(launch.run_dir) / LOG_FILE).open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *launch.command(0),
            env={**launch.variables(0), ADDRESS_VARIABLE: address, LISTEN_VARIABLE: listen},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    log.info("ranks_started", pid=process.pid, nodes=launch.nodes, ranks=launch.num_ranks)
    return process
