"""How ranks are started on one node or several: torchrun's command and the ranks' environment.

    conductor's node (0)  Ranks ──torchrun──> its ranks, rank 0 among them
    every other node (i)  node.py ──torchrun──> its ranks; asks the conductor what to start

One node meets at a free port of its own; several meet at `cluster.rendezvous`. What was started is
written to `ranks.json` in the run folder.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shared.job import Job
from shared.job_actor import EnvironmentSection, WatchdogSection
from shared.process import free_port
from shared.section import site_value

LEARNER = ("-m", "services.trainer.learner")
RECORD_FILE = "ranks.json"
MARK = "TANDEM_RANKS"
REASON_CHARS = 2000
ADDRESS_VARIABLE = "TANDEM_CHANNEL"  # where rank 0 finds the conductor
LISTEN_VARIABLE = "TANDEM_LISTEN"  # where ranks of one node serve their parts of a version
WATCHDOG_DIR = "watchdog"
WATCHDOG_VARIABLE = "TANDEM_WATCHDOG_DIR"
TIMEOUT_VARIABLE = "TANDEM_COLLECTIVE_TIMEOUT_S"
DETERMINISTIC_VARIABLE = "TANDEM_DETERMINISTIC"
_VARIABLES = {
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE"),
    *(WATCHDOG_VARIABLE, TIMEOUT_VARIABLE, DETERMINISTIC_VARIABLE),
    *EnvironmentSection.model_fields,
    *WatchdogSection().variables(""),
}


class Launch(BaseModel):
    """One start of all ranks. Example: nodes 2, ranks_per_node 8, host '10.0.0.1'."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    number: int
    """Of this start, in order of time; another number means: end yours, start these."""
    nodes: int
    """Nodes that take part."""
    ranks_per_node: int
    """Processes on each of them."""
    host: str
    """Of the rendezvous."""
    port: int
    """Of the rendezvous."""
    timeout_s: float
    """How long nodes wait for each other."""
    run_dir: str
    """Of all nodes: the run folder is on a file system that they share."""
    environment: dict[str, str]
    """`$SITE_…` values are each node's own."""
    program: list[str] = Field(default_factory=lambda: list(LEARNER))
    """Arguments of torchrun."""

    @field_validator("environment")
    @classmethod
    def _is_ours(cls, given: dict[str, str]) -> dict[str, str]:
        """A node takes this from the network: nothing else may be set by it."""
        if strange := given.keys() - _VARIABLES:
            raise ValueError(f"{', '.join(sorted(strange))}: no variable of a rank")
        return given

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @classmethod
    def of(cls, job: Job, run_dir: Path, *, number: int, program: list[str] | None = None) -> Self:
        """ValueError for a site value that this node does not have."""
        cluster = job.cluster
        several = cluster.actor_nodes > 1
        host = site_value(cluster.rendezvous.host or "") if several else "127.0.0.1"
        return cls(
            number=number,
            nodes=cluster.actor_nodes,
            ranks_per_node=cluster.gpus_per_node,
            host=host,
            port=cluster.rendezvous.port if several else free_port(),
            timeout_s=cluster.rendezvous.timeout_s,
            run_dir=str(run_dir),
            environment=environment(job, run_dir),
            program=program or list(LEARNER),
        )

    def command(self, node: int) -> list[str]:
        """torchrun's, for one node."""
        argv = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
        argv += ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.ranks_per_node)]
        if self.nodes == 1:
            argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.host}:{self.port}"]
        else:  # ranks are numbered by node, so that rank 0 is the conductor's neighbour
            argv += ["--node-rank", str(node), "--master-addr", self.host]
            argv += ["--master-port", str(self.port)]
            argv += ["--rdzv-conf", f"timeout={self.timeout_s:g}"]
        log_dir = Path(self.run_dir) / "torchrun"  # else a folder in /tmp that nobody removes
        return [*argv, "--log-dir", str(log_dir), *self.program]

    def variables(self, node: int) -> dict[str, str]:
        """The whole environment of this node's ranks; ValueError for a site value not set here."""
        own = {name: site_value(value) for name, value in self.environment.items()}
        return {**os.environ, **own, MARK: mark_of(self.run_dir, node)}

    def shares_folder(self) -> bool:
        """Whether the run folder here is the conductor's, which has recorded this start in it."""
        try:
            found = json.loads((Path(self.run_dir) / RECORD_FILE).read_text())
        except FileNotFoundError:
            return False
        return bool(found.get("number") == self.number)

    def record(self) -> None:
        """Keep what is started in the run folder."""
        path = Path(self.run_dir) / RECORD_FILE
        text = json.dumps({**self.model_dump(), "command": self.command(0)}, indent=2)
        building = path.with_suffix(".building")
        building.write_text(text + "\n")
        building.rename(path)


class Refusal(BaseModel):
    """A node has no ranks. Example: number 7, node 1, reason 'no such run folder'."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    number: int
    """Of the start that it refuses."""
    node: int = Field(ge=1)
    """Which node it is."""
    reason: str = Field(max_length=REASON_CHARS)
    """Why it will not start them, or how they ended."""
    started: bool = False
    """Whether they were started, and ended by themselves."""


class LaunchBoard:
    """Where the conductor posts what is started, for nodes that ask, and they what they refuse.
    `program` replaces the learner in tests."""

    def __init__(self, program: list[str] | None = None) -> None:
        self.current: Launch | None = None
        self._program = program
        self._refusal: asyncio.Future[Refusal] | None = None

    def post(self, job: Job, run_dir: Path) -> Launch:
        """Recorded in the run folder before any node can see it."""
        launch = Launch.of(job, run_dir, number=time.time_ns(), program=self._program)
        launch.record()
        self.current, self._refusal = launch, asyncio.get_running_loop().create_future()
        return launch

    def refuse(self, refusal: Refusal) -> None:
        """Of another start than the current one nobody cares any more."""
        is_current = self.current is not None and self.current.number == refusal.number
        if is_current and self._refusal is not None and not self._refusal.done():
            self._refusal.set_result(refusal)

    async def refused(self) -> Refusal:
        """Waits until a node refuses the start that was posted last, or lost its ranks of it."""
        assert self._refusal is not None, "nothing was posted"
        return await asyncio.shield(self._refusal)

    def clear(self) -> None:
        self.current = None


def mark_of(run_dir: str | Path, node: int) -> str:
    """By which the processes of one node's ranks are found, and ended."""
    return f"{run_dir}:{node}"


def environment(job: Job, run_dir: Path) -> dict[str, str]:
    """What the job asks of its ranks: threads, transport, watchdog, determinism."""
    actor = job.actor
    threads = str(actor.num_threads)
    repeatable = {DETERMINISTIC_VARIABLE: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TORCHDYNAMO_DISABLE": "1",
        **(repeatable if actor.deterministic else {}),
        **actor.watchdog.variables(str(run_dir)),
        WATCHDOG_VARIABLE: str(run_dir / WATCHDOG_DIR),
        TIMEOUT_VARIABLE: f"{actor.watchdog.collective_timeout_s:g}",
        **actor.env.variables(),
    }
