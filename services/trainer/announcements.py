"""What every service must be able to find at the broker: which job is on."""

from collections.abc import Sequence
from typing import cast

from redis.asyncio import Redis

from shared import topology
from shared.job import Job
from shared.messages import JobAnnounced, ProfileAnnounced
from shared.route_store import delete_all_routes
from shared.streams import announce

KEEP_CHANGES = 1000
KEEP_ENDED_S = 3600


async def announce_active(
    redis: Redis,
    *,
    job_id: str,
    job: Job,
    trainer_url: str,
    profile: ProfileAnnounced | None = None,
) -> None:
    """Make the job the current one; its keys live as long as it does."""
    for key in _keys(job_id):
        await redis.persist(key)
    await _announce(redis, job_id, job, trainer_url, active=True, profile=profile)


async def announce_finished(redis: Redis, *, job_id: str, job: Job, trainer_url: str) -> None:
    """The job asks for nothing any more."""
    await _announce(redis, job_id, job, trainer_url, active=False)


async def retire_others(redis: Redis, running: Sequence[str]) -> None:
    """End the announced job if it is none of ours: services would wait for it in vain."""
    body = cast(bytes | None, await redis.get(topology.JOB_CURRENT))
    known = None if body is None else JobAnnounced.unpack(body)
    if known is not None and known.state == "active" and known.job_id not in running:
        ended = known.model_copy(update={"state": "finished"}).pack()
        await announce(redis, topology.JOB_CHANGES, ended, current_key=topology.JOB_CURRENT)
        await let_expire(redis, known.job_id)


async def let_expire(redis: Redis, job_id: str) -> None:
    """Have the broker forget an ended job's streams after a while, and its routes at once."""
    for key in _keys(job_id):
        await redis.expire(key, KEEP_ENDED_S)
    await delete_all_routes(redis, job_id)


def work_streams(job_id: str) -> dict[str, tuple[str, str]]:
    """Stage -> its stream and consumer group, in the order in which a group passes them."""
    return {
        "prompts": (topology.prompts(job_id), topology.SAMPLERS),
        "rollouts": (topology.rollouts(job_id), topology.GRADERS),
        "groups": (topology.groups(job_id), topology.TRAINERS),
    }


async def _announce(
    redis: Redis,
    job_id: str,
    job: Job,
    trainer_url: str,
    *,
    active: bool,
    profile: ProfileAnnounced | None = None,
) -> None:
    body = JobAnnounced(
        job_id=job_id,
        state="active" if active else "finished",
        trainer_url=trainer_url,
        job=job.model_dump(mode="json"),
        profile=profile,
    ).pack()
    await announce(
        redis,
        topology.JOB_CHANGES,
        body,
        current_key=topology.JOB_CURRENT,
        keep=KEEP_CHANGES,
    )


def _keys(job_id: str) -> list[str]:
    streams = [stream for stream, _ in work_streams(job_id).values()]
    streams.append(topology.evals(job_id))
    return [
        *streams,
        *(topology.dead(stream) for stream in streams),
        topology.events(job_id),
        topology.spans(job_id),
        topology.holds(job_id),
        topology.weights_current(job_id),
    ]
