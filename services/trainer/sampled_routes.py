"""The routes that came with a job's groups: fetched and checked on arrival, deleted with the ack.

A group whose routes are gone is not trained on without them: it is dropped and another one drawn.
"""

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis

from shared.errors import Rejected
from shared.job import Job, expand_path
from shared.messages import RolloutGroup
from shared.models.deepseek_v4.architecture import Architecture
from shared.route_store import delete_routes, load_routes
from shared.routes import unpack_routes


class SampledRoutes:
    """`arch` is None where the job replays nothing."""

    def __init__(
        self, redis: Redis, *, job_id: str, job: Job, arch: Architecture | None = None
    ) -> None:
        self._redis = redis
        self._job_id = job_id
        self._replay = job.actor.replay
        self._arch = arch

    @classmethod
    def of(cls, redis: Redis, *, job_id: str, job: Job) -> "SampledRoutes":
        """Reads the architecture, if it is needed: OSError or ValueError for a bad checkpoint."""
        if not job.actor.replay.on:
            return cls(redis, job_id=job_id, job=job)
        arch = Architecture.load(expand_path(job.model.rollout_checkpoint))
        return cls(redis, job_id=job_id, job=job, arch=arch)

    async def fetch(self, group: RolloutGroup) -> tuple[bytes, ...] | None:
        """A blob per rollout, or None if nothing is replayed.

        `RoutesLost` when they are gone, `Rejected` when they can never be right.
        """
        if self._arch is None:
            return None
        name = group.prompt.group_id
        if group.routes is None:
            raise Rejected(f"{name} has no routes, which actor.replay asks for")
        blobs = await load_routes(
            self._redis,
            group.routes,
            job_id=self._job_id,
            group_id=name,
            num_rollouts=len(group.rollouts),
        )
        try:
            await asyncio.to_thread(self._check, group, blobs, self._arch)
        except ValueError as err:
            raise Rejected(str(err)) from err
        return tuple(blobs)

    async def forget(self, groups: Sequence[RolloutGroup]) -> None:
        """Their messages are acked for good."""
        for group in groups:
            await delete_routes(
                self._redis, group.routes, job_id=self._job_id, group_id=group.prompt.group_id
            )

    def _check(self, group: RolloutGroup, blobs: Sequence[bytes], arch: Architecture) -> None:
        num_prompt = len(group.prompt.prompt_token_ids)
        for rollout, blob in zip(group.rollouts, blobs, strict=True):
            if not (num_response := len(rollout.response_token_ids)):
                continue
            unpack_routes(
                blob,
                arch,
                num_prompt + num_response - 1,
                routing=self._replay.routing,
                indexer=self._replay.indexer,
                of=rollout.rollout_id,
            )
