"""Groups of the job in progress.

rollouts stream ──> grade every rollout ──> ScoredGroup (groups stream) ──> group_graded (events)
      └── acked after both; a crash in between has the group graded again, and the trainer
          knows it by its id
"""

import asyncio
import time
from collections import Counter

import structlog
from redis.asyncio import Redis

from services.reward.grading import Asked, Grading
from shared import topology
from shared.chat import graded_text
from shared.current_job import CurrentJob
from shared.errors import Rejected
from shared.job_reward import RewardSection
from shared.messages import Event, Outcome, RolloutGroup, Score, ScoredGroup
from shared.profiled import Profiled
from shared.spans import span
from shared.streams import Consumer, backlog, publish
from shared.tasks import following, wait_for_event
from shared.telemetry import counter, histogram, note_backlog, now_s

log = structlog.get_logger()

BACKLOG_EVERY_S = 5.0
LEASE_S = 15.0

GROUPS = counter("reward_groups_total", "Groups graded and handed on")
GROUP_SECONDS = histogram("reward_group_seconds", "From taking a group to handing it on")


class GradeWorker:
    """Several groups at a time, of the active job."""

    def __init__(
        self,
        redis: Redis,
        grading: Grading,
        current: CurrentJob,
        *,
        replica: str,
        concurrency: int,
        drain_s: float,
    ) -> None:
        self._redis = redis
        self._grading = grading
        self._current = current
        self.profiled = Profiled(redis, current, service="reward", replica=replica)
        self._replica = replica
        self._concurrency = concurrency
        self._drain_s = drain_s
        self._changed = asyncio.Event()

    @property
    def job_id(self) -> str | None:
        return self._current.active_id

    async def run(self, stop: asyncio.Event) -> None:
        """Serve one job after the other until `stop`."""
        while not stop.is_set():
            self._changed.clear()
            if self.job_id is None:
                await wait_for_event(self._changed, 0.5)
                continue
            async with following(stop, self._changed):
                await self._serve(self.job_id)

    async def follow(self, stop: asyncio.Event) -> None:
        """Keep up with the trainer's announcements."""
        await self._current.follow(stop, self._changed)

    async def watch_backlog(self, stop: asyncio.Event) -> None:
        """Measure how many groups wait."""
        while not stop.is_set():
            if job_id := self.job_id:
                stream = topology.rollouts(job_id)
                note_backlog("rollouts", await backlog(self._redis, stream, topology.GRADERS))
            await wait_for_event(stop, BACKLOG_EVERY_S)

    async def _serve(self, job_id: str) -> None:
        job = self._current.job
        assert job is not None
        log.info("job_followed", job_id=job_id, grader=job.reward.grader)
        suites = job.eval.suites if job.eval else []
        graders = [job.reward.grader, *(part.grader for part in job.reward.parts)]
        await self._grading.prepare([*graders, *(suite.grader for suite in suites)])

        async def handle(body: bytes) -> None:
            group = RolloutGroup.unpack(body)
            with structlog.contextvars.bound_contextvars(group_id=group.prompt.group_id):
                await self._grade(group, job_id, job.reward)

        consumer = Consumer(
            self._redis, topology.rollouts(job_id), topology.GRADERS, self._replica, LEASE_S
        )
        await consumer.run(
            handle, stop=self._changed, concurrency=self._concurrency, drain_s=self._drain_s
        )

    async def _grade(self, group: RolloutGroup, job_id: str, reward: RewardSection) -> None:
        prompt = group.prompt
        if prompt.job_id != job_id:
            raise Rejected(f"{prompt.group_id} is of job {prompt.job_id}, not of {job_id}")
        asked = [
            Asked(
                grader=prompt.grader,
                response=graded_text(prompt.prompt_text, rollout.text),
                gold=prompt.gold,
                timeout_s=reward.timeout_s,
                parts=tuple(reward.parts),
                overlong=reward.overlong,
                num_tokens=len(rollout.response_token_ids),
            )
            for rollout in group.rollouts
        ]
        if unknown := next(filter(None, map(self._grading.unknown, asked)), None):
            known = ", ".join(self._grading.names)
            raise Rejected(f"{prompt.group_id}: no grader {unknown!r}; there are {known}")
        begin_s = time.monotonic()
        with span("group", "groups", group=prompt.group_id):
            outcomes = await self._grading.grade(
                asked, retries=reward.retries, retried=reward.retried
            )
        seconds = time.monotonic() - begin_s
        scored = ScoredGroup(group=group, outcomes=outcomes, grading_s=seconds)
        await publish(self._redis, topology.groups(job_id), scored.pack())
        await self._tell(group, outcomes, seconds)
        GROUPS.inc()
        GROUP_SECONDS.observe(time.monotonic() - begin_s)

    async def _tell(self, group: RolloutGroup, outcomes: list[Outcome], seconds: float) -> None:
        values = [outcome.value for outcome in outcomes if isinstance(outcome, Score)]
        fields = {
            "group_id": group.prompt.group_id,
            "reward_mean": sum(values) / len(values) if values else None,
            "outcomes": dict(Counter(outcome.kind for outcome in outcomes)),
            "seconds": seconds,
        }
        event = Event(
            name="group_graded",
            job_id=group.prompt.job_id,
            service="reward",
            replica=self._replica,
            at_s=now_s(),
            fields=fields,
        )
        log.info("group_graded", job_id=event.job_id, **fields)
        await publish(self._redis, topology.events(event.job_id), event.pack())
