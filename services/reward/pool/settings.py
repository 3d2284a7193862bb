"""What the pool may use."""

from pydantic import Field

from shared.config import Part
from shared.process import available_cores


class PoolConfig(Part):
    workers: int = Field(default_factory=lambda: 2 * available_cores() + 4, gt=0)
    """Worker processes for normal checks; default: two per core (of a container's limit) and four
    more, so that those that are stuck before they count as slow are not missed."""
    spare_workers: int = Field(4, ge=0)
    """Workers that are ready to take the place of one that turns slow."""
    slow_workers: int = Field(4, gt=0)
    """Slow checks that may run beside them."""
    slow_after_s: float = Field(0.05, gt=0)
    """A check that runs longer is moved to the slow lane."""
    slow_wait_s: float = Field(60.0, gt=0)
    """How long a slow check may wait for a place; then it is an error, never a timeout."""
    slow_nice: int = Field(19, ge=0, le=19)
    """By how much the slow lane's scheduling priority is lower; 19 is the most."""
    memory_bytes: int = Field(2**30, ge=64 * 2**20)
    """What a check may allocate on top of the loaded graders."""
    max_batch: int = Field(16, gt=0)
    """Checks sent to a worker at once."""
    max_checks_per_worker: int = Field(20_000, gt=0)
    """A worker is replaced after so many checks."""
    plug_ins: dict[str, str] = Field(default_factory=dict)
    """Further graders as name = "module:function"; only these modules are ever imported."""
