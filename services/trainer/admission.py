"""How many groups may be out, and what policy version each must be sampled with.

Staleness is bounded here, before anything is sampled: a group is drawn for the first of the coming
steps that lacks groups, and by then its version will be so many steps older. What turns out
unusable is so replaced for the same step, by versions that are served already. What arrives out of
line and is too old all the same is dropped and counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shared.job import Job

USABLE_MARGIN = 0.1  # more groups than expected may turn out usable


@dataclass(slots=True)
class Progress:
    """Where the job stands; the conductor moves it, others read it."""

    num_steps: int
    step: int = 0  # the newest step whose batch is durable
    policy_version: int = 0  # what that step makes, and what the next one trains
    published_version: int = -1  # newest version offered to servers
    usable_share: float = 1.0  # of groups that arrive, as far as is known
    doing: str = "beginning"  # in words, for people

    @property
    def steps_left(self) -> int:
        return self.num_steps - self.step


@dataclass(frozen=True, slots=True)
class Admission:
    groups_per_step: int
    max_lag: int
    oversampling: float = 1.0
    max_redraws: float = 8.0

    @classmethod
    def of(cls, job: Job) -> "Admission":
        return cls(
            job.sampling.groups_per_step,
            job.algorithm.max_lag,
            job.sampling.oversampling,
            job.sampling.max_redraws,
        )

    def max_open(self, progress: Progress) -> int:
        """Slots: groups drawn and neither trained nor dropped."""
        batches = min(self.max_lag + 1, progress.steps_left)
        return math.ceil(batches * self.groups_per_step * self.oversampling)

    def min_policy_version(self, num_kept: int, out: Mapping[int, int], progress: Progress) -> int:
        """The oldest version with which the next group may be sampled.

        `num_kept` usable groups are here; `out` counts those that are not yet, by the oldest
        version each may be sampled with. A version that is not published yet means: too early, the
        group would be too old when its turn comes. Strictly on-policy jobs sample all with the
        version that is trained next; what is more than needed is their surplus.
        """
        if self.max_lag == 0:
            return progress.policy_version
        share = min(1.0, progress.usable_share + USABLE_MARGIN)
        version = self.oldest_trainable(progress)  # of the next step; below 0 as long as all may do
        num_out = sum(number for oldest, number in out.items() if oldest <= max(0, version))
        num_wanted = self.groups_per_step
        while int(num_kept + num_out * share) >= num_wanted:
            version, num_wanted = version + 1, num_wanted + self.groups_per_step
            if version > 0:
                num_out += out.get(version, 0)
        return max(0, version)

    def oldest_trainable(self, progress: Progress) -> int:
        return progress.policy_version - self.max_lag

    def max_drawn_per_step(self) -> int:
        """Open groups and those dropped on arrival, together, while one step is collected."""
        carried = math.ceil(self.max_lag * self.groups_per_step * self.oversampling)
        return self.max_settled_per_step() + carried

    def max_settled_per_step(self) -> int:
        """Groups that may arrive for one step before it is cut short."""
        return math.ceil(self.max_redraws * self.groups_per_step)
