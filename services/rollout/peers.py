"""Among how many servers a job's prompts are divided: those that take them, or will at once.

An update makes every server late for a moment, one after the other; if the first back counted only
itself, it would take all. So one that is late still counts, until the job's deadline for updates:
from then on the trainer calls it quarantined, and its part must not wait for it.
"""

from collections.abc import Collection, Sequence

from shared.registry import Replica

_RUNNING = ("waiting_for_weights", "serving", "updating")


class Peers:
    def __init__(self) -> None:
        self._late_since_s: dict[str, float] = {}

    def count(
        self,
        replicas: Sequence[Replica],
        *,
        job_id: str,
        announced: int | None,
        held: Collection[str],
        patience_s: float,
        now_s: float,
    ) -> int:
        """At least 1, for the server that asks. `announced` is the current version."""
        able = {
            replica.name: _is_current(replica, announced)
            for replica in replicas
            if replica.job_id == job_id
            and replica.state in _RUNNING
            and not replica.paused
            and replica.name not in held
        }
        since = self._late_since_s
        self._late_since_s = {
            name: since.get(name, now_s) for name, is_able in able.items() if not is_able
        }
        patient = [at_s for at_s in self._late_since_s.values() if now_s - at_s < patience_s]
        return max(1, sum(able.values()) + len(patient))


def _is_current(replica: Replica, announced: int | None) -> bool:
    version = replica.policy_version
    return replica.state == "serving" and version is not None and version >= (announced or 0)
