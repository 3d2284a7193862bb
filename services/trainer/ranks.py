"""One set of Megatron ranks: torchrun children of this process, asked through rank 0's channel.

    conductor ──channel──> rank 0 ──process group──> other ranks
        └── torchrun ──starts──────────^───────────────^

One operation at a time, each with a deadline. Ranks that die or answer nothing in time are lost as
a whole: everything they started is killed, and a new set is started elsewhere (`actor.py`).
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, cast

import structlog
from pydantic import Field

from shared.channel import AsyncChannel, listening
from shared.config import Part
from shared.errors import ChannelClosed, DeadlineExceeded, TandemError
from shared.job import Job
from shared.process import die_with_parent, free_port, kill_marked, prepare_to_fork
from shared.tasks import end

log = structlog.get_logger()
MARK = "TANDEM_RANKS"
LOG_FILE = "ranks.log"
_TAIL_LINES = 8
_GOODBYE_S = 5.0


class RanksLost(TandemError):
    """The ranks died or stopped answering."""


class RankDeadlines(Part):
    """Seconds that one operation of the ranks may take."""

    start_s: float = Field(300.0, gt=0)
    """From starting the processes until rank 0 has connected."""
    load_s: float = Field(900.0, gt=0)
    """Reading weights or a checkpoint."""
    step_s: float = Field(3600.0, gt=0)
    """One optimiser step."""
    export_s: float = Field(900.0, gt=0)
    """Writing one version of the weights."""
    save_s: float = Field(1800.0, gt=0)
    """Writing one checkpoint."""
    score_s: float = Field(300.0, gt=0)
    """Scoring a list of sequences."""


class RankSet(Protocol):
    """What the rest of the conductor asks of the ranks. Every call may raise `RanksLost`."""

    async def load(self, path: Path) -> int: ...
    async def train_step(self, batch: bytes) -> dict[str, Any]: ...
    async def export(
        self, policy_version: int, path: Path, base: Path | None = None
    ) -> dict[str, Any]: ...
    async def save(self, step: int, path: Path) -> dict[str, Any]: ...
    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]: ...
    async def trace(self, request: bytes, policy_version: int) -> bytes: ...
    async def stop(self) -> None: ...


class Ranks:
    """Built by `start`; after `stop` or `RanksLost` it is of no more use."""

    def __init__(
        self, resources: AsyncExitStack, process: asyncio.subprocess.Process, log_path: Path
    ) -> None:
        self._resources = resources
        self._process = process
        self._log_path = log_path
        self._channel: AsyncChannel | None = None
        self._deadlines = RankDeadlines()

    @classmethod
    async def start(cls, *, job_id: str, job: Job, run_dir: Path, deadlines: RankDeadlines) -> Self:
        """Start the processes and have them load the job's first weights.

        `run_dir` is absolute. Raises `RanksLost`, or what the ranks say of the weights.
        """
        mark = str(run_dir)
        kill_marked(MARK, mark)  # what a killed conductor may have left
        async with AsyncExitStack() as stack:
            listener = await stack.enter_async_context(listening())
            process = await _spawn(job, run_dir, listener.address, mark)
            stack.push_async_callback(process.wait)
            stack.callback(kill_marked, MARK, mark)  # runs first
            ranks = cls(stack, process, run_dir / LOG_FILE)
            ranks._deadlines = deadlines
            await ranks._connect(listener.accept(deadlines.start_s))
            first = {"job_id": job_id, "job": job.model_dump(mode="json"), "run_dir": mark}
            await ranks._ask("init", first, deadlines.load_s)
            ranks._resources = stack.pop_all()
        return ranks

    async def load(self, path: Path) -> int:
        """Continue from a checkpoint; the step that it holds."""
        answer = await self._ask("load", {"path": str(path)}, self._deadlines.load_s)
        return int(answer["step"])

    async def train_step(self, batch: bytes) -> dict[str, Any]:
        """Take the step of a packed `TrainingBatch`; raises `Rejected` if the ranks refuse it."""
        return await self._ask("train_step", {"batch": batch}, self._deadlines.step_s)

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

    async def save(self, step: int, path: Path) -> dict[str, Any]:
        return await self._ask("save", {"step": step, "path": str(path)}, self._deadlines.save_s)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """Log-probabilities of tokens 1..T-1 of each sequence under the weights as they are now."""
        what = {"sequences": [list(ids) for ids in sequences], "temperature": temperature}
        answer = await self._ask("score", what, self._deadlines.score_s)
        return [[float(value) for value in row] for row in answer["logprobs"]]

    async def trace(self, request: bytes, policy_version: int) -> bytes:
        """A packed `Traced` for a packed `TraceRequest`; the version is what they hold."""
        what = {"request": request, "policy_version": policy_version}
        answer = await self._ask("trace", what, self._deadlines.score_s)
        return cast(bytes, answer["traced"])

    async def stop(self) -> None:
        """Ask them to end, then see that nothing of them is left: who is late is killed."""
        if self._channel is not None and not self._channel.closed.is_set():
            with contextlib.suppress(TandemError, TimeoutError):
                await self._channel.request("stop", timeout_s=_GOODBYE_S)
                await asyncio.wait_for(self._process.wait(), _GOODBYE_S)
        await self._resources.aclose()

    async def _connect(self, arrival: Any) -> None:
        """Wait for rank 0, or for torchrun's end, whichever comes first."""
        accepting = asyncio.ensure_future(arrival)
        ending = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({accepting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                raise RanksLost(f"torchrun ended with code {ending.result()}; {self._tail()}")
            self._channel = accepting.result()
        except DeadlineExceeded as err:
            raise RanksLost(f"{err}; {self._tail()}") from err
        finally:
            await end(ending)
            await end(accepting)

    async def _ask(self, op: str, payload: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._channel is not None
        try:
            return await self._channel.request(op, payload, timeout_s=deadline_s)
        except (ChannelClosed, DeadlineExceeded) as err:
            raise RanksLost(f"{op}: {err}; {self._tail()}") from err

    def _tail(self) -> str:
        """The end of the ranks' log, which says why they died."""
        if not self._log_path.exists():
            return f"{self._log_path} does not exist"
        lines = self._log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"{self._log_path} ends with: " + " | ".join(line.strip() for line in lines)


async def _spawn(job: Job, run_dir: Path, address: str, mark: str) -> asyncio.subprocess.Process:
    prepare_to_fork()
    num_ranks = job.cluster.gpus_per_node
    argv = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(num_ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--log-dir", str(run_dir / "torchrun")),  # else a folder in /tmp that nobody removes
        *("-m", "services.trainer.learner", "--channel", address),
    ]
    threads = str(job.actor.num_threads)
    env = {
        **os.environ,
        MARK: mark,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TORCHDYNAMO_DISABLE": "1",
    }
    with (run_dir / LOG_FILE).open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    log.info("ranks_started", pid=process.pid, ranks=num_ranks)
    return process
