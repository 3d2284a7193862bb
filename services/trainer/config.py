"""Settings of the trainer service; what a job decides is in its document instead."""

from pathlib import Path

from pydantic import Field

from services.trainer.ranks import RankDeadlines
from shared.config import Part, ServiceConfig, settings_of

PROJECT_ROOT = Path(__file__).resolve().parents[2]


class ConductorConfig(Part):
    """How jobs are run."""

    canary: bool = True
    """The first commit of a version goes alone; the other servers follow once one accepted it."""
    settle_grace_s: float = Field(2.0, ge=0)
    """How long on-policy jobs wait for further servers once the first one serves a version."""
    hold_grace_s: float = Field(30.0, ge=0)
    """How long a server that is held for an evaluation may be away before another is held."""
    quiet_s: float = Field(30.0, gt=0)
    """After so long without a graded group, look for groups that got lost."""
    goodbye_s: float = Field(10.0, gt=0)
    """How long a stopping job's loops may take to end by themselves."""
    report_s: float = Field(180.0, gt=0)
    """How long writing the report may take."""


class TrainerConfig(ServiceConfig):
    """The conductor's process."""

    model_config = settings_of("trainer")

    port: int = Field(8700, ge=0, le=65535)
    """TCP port to listen on."""
    shards_port: int = Field(0, ge=0, le=65535)
    """TCP port at which servers pull weights; 0: any free one."""
    runs_dir: Path = Path("runs")
    """One folder per job is made in it, with everything that the job leaves."""
    queue_dir: Path | None = None
    """Where the queue of jobs is kept; default: `runs_dir`. Jobs of one queue run one by one."""
    data_roots: tuple[Path, ...] = ()
    """Folders besides the project's and `$DATA_ROOT` that jobs may name files of."""
    ranks: RankDeadlines = RankDeadlines()
    """Deadlines of the Megatron ranks."""
    conductor: ConductorConfig = ConductorConfig()
    """How jobs are run."""
