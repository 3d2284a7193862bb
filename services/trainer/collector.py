"""Takes graded groups from the stream, settles each once, and keeps what steps will train on.

    groups stream ──> poison ─> buried   seen before ─> acked, counted   unusable ─> dropped
                  └─> kept, unacked ──take()──> a step's worth, acked once it is trained

A kept group stays unacked: should this process die, the broker gives it again.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import structlog
from redis.asyncio import Redis

from services.trainer.admission import Admission, Progress
from services.trainer.batches import (
    KeptGroup,
    Unusable,
    dropped_facts,
    graded_rewards,
    judge,
)
from services.trainer.books import Books
from services.trainer.entries import Group
from services.trainer.events import EventLog, EventMaker
from services.trainer.feeder import Feeder
from services.trainer.prompts import PromptSource
from services.trainer.recording import Recording
from services.trainer.sampled_routes import SampledRoutes
from shared import topology
from shared.errors import DeadlineExceeded, Rejected, TandemError
from shared.messages import PromptGroup, ScoredGroup
from shared.route_store import RoutesLost
from shared.session import Session
from shared.streams import Consumer, Delivery
from shared.tasks import wait_for_event
from shared.telemetry import counter

log = structlog.get_logger()
BLOCK_S = 0.4
_MAX_UNACKED_BESIDE_KEPT = 64


class StepStarved(TandemError):
    """A step's bound was hit, and there is nothing to train, or the job wants whole steps only."""


class Collector:
    def __init__(
        self,
        redis: Redis,
        *,
        books: Books,
        source: PromptSource,
        feeder: Feeder,
        admission: Admission,
        progress: Progress,
        record: EventLog,
        events: EventMaker,
        routes: SampledRoutes,
        name: str,
        recording: Recording | None = None,
    ) -> None:
        self._books = books
        self._source = source
        self._feeder = feeder
        self._admission = admission
        self._progress = progress
        self._record = record
        self._events = events
        self._routes = routes
        self._recording = recording
        self._kept: dict[str, KeptGroup] = {}
        self._taken: dict[str, KeptGroup] = {}  # by a step that is not finished yet
        self._changed = asyncio.Event()
        self._session: Session | None = None
        stream = topology.groups(source.job_id)
        self._consumer = Consumer(redis, stream, topology.TRAINERS, name, block_s=BLOCK_S)
        self._settled = counter(
            "trainer_groups_total", "Groups by what became of them.", ("outcome",)
        )
        self.last_arrival_s = time.monotonic()

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def held_ids(self) -> set[str]:
        """Groups that this process has in hand."""
        return {*self._kept, *self._taken}

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until `stop`; what is kept then goes back to the broker."""
        max_unacked = self._admission.max_open(self._progress) + _MAX_UNACKED_BESIDE_KEPT
        async with self._consumer.session() as session:
            self._session = session
            try:
                async for delivery in session.deliveries(stop, max_unacked=max_unacked):
                    await self._settle(session, delivery)
            finally:
                self._session = None

    async def take(self, *, deadline_s: float) -> list[KeptGroup]:
        """A step's worth of groups; they are no longer kept here.

        Deterministic jobs take the lowest draws, others the oldest versions, too old for later.

        Fewer come when a bound of the sampling section is hit; `StepStarved` when even then there
        is none or the job wants whole steps, and `DeadlineExceeded` after `deadline_s`.
        """
        began_s = time.monotonic()
        ends_s = began_s + deadline_s
        wanted = self._admission.groups_per_step
        while True:
            self._changed.clear()
            await self.drop_outdated()
            bound = self._bound_hit(began_s)
            enough = len(self._kept) >= wanted
            if not self._is_awaited():
                if enough or bound:
                    break
                if self._source.job.asks_in_waves:
                    await self._feeder.fill(next_wave=True)
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                have = f"{len(self._kept)} of {wanted} groups are there"
                raise DeadlineExceeded(
                    f"the groups of step {self._progress.step + 1}: {have}", deadline_s
                )
            await wait_for_event(self._changed, min(left_s, 1.0))
        if not enough:
            self._be_short(bound or "")
        oldest = sorted(self._kept.values(), key=self._turn)[:wanted]
        chosen = sorted(oldest, key=lambda group: group.draw)
        self._taken = {group.group_id: self._kept.pop(group.group_id) for group in chosen}
        return chosen

    async def finish(self, groups: Sequence[KeptGroup]) -> None:
        """Ack groups that are trained. Those of a broken session come again and are refused."""
        self._taken = {}
        self._feeder.forget(group.group_id for group in groups)
        self._settled.labels("trained").inc(len(groups))
        if self._session is not None:
            await self._session.ack([group.entry_id for group in groups])
        await self._routes.forget([group.scored.group for group in groups])

    async def drop_kept(self, *, reason: str) -> None:
        """Drop what came and was not taken."""
        kept = [entry for name in self._kept if (entry := self._books.group(name))]
        await self.drop(kept, reason=reason)

    async def drop_outdated(self) -> None:
        """Drop kept groups that a later version has overtaken, and draw others; none is kept when
        this returns.

        What was judged before that version may be kept while others are dropped: look again.
        """
        while outdated := self._outdated():
            await self.drop(outdated, reason="too_old")
            await self._feeder.fill()

    async def drop(self, entries: Sequence[Group], *, reason: str, **fields: object) -> None:
        """Drop those of the groups that are open, wherever they are."""
        names = [entry.group_id for entry in entries if self._is_open(entry.group_id)]
        held: list[KeptGroup] = []
        for name in names:
            assert name not in self._taken, f"{name} is being trained"
            kept = self._kept.pop(name, None)
            if kept is not None:
                held.append(kept)
            rewards = None if kept is None else kept.rewards
            event = self._events("group_dropped", group_id=name, reason=reason, **fields)
            self._books.drop_group(name, reason=reason, event=event, rewards=rewards)
            self._settled.labels(reason).inc()
        self._record.flush_journal()
        if held and self._session is not None:
            await self._session.ack([kept.entry_id for kept in held])
        await self._routes.forget([kept.scored.group for kept in held])
        await self._feeder.withdraw(names)

    def _is_open(self, name: str) -> bool:
        entry = self._books.group(name)
        return entry is not None and entry.state == "open"

    async def _settle(self, session: Session, delivery: Delivery) -> None:
        self.last_arrival_s = time.monotonic()
        try:
            scored = ScoredGroup.unpack(delivery.body)
            entry = self._checked(scored.group.prompt)
            self._check_rollouts(scored)
        except Rejected as err:
            await session.bury(delivery, str(err))
            return
        with structlog.contextvars.bound_contextvars(group_id=entry.group_id):
            await self._settle_checked(session, delivery, scored, entry)

    async def _settle_checked(
        self, session: Session, delivery: Delivery, scored: ScoredGroup, entry: Group
    ) -> None:
        name = entry.group_id
        held = self._kept.get(name) or self._taken.get(name)
        if held is not None and held.entry_id == delivery.entry_id:
            return  # the broker gave what we hold once more
        if held is not None or entry.state != "open":
            await self._refuse_again(session, delivery, scored, entry)
            return
        if self._recording is not None:
            self._recording.keep_group(scored)
        verdict = judge(
            scored,
            job=self._source.job,
            oldest_trainable=self._admission.oldest_trainable(self._progress),
        )
        if isinstance(verdict, Unusable):
            await self._drop_arrived(session, delivery, scored, verdict)
        else:
            await self._keep(session, delivery, scored, verdict)
        self._changed.set()

    async def _keep(
        self, session: Session, delivery: Delivery, scored: ScoredGroup, rewards: tuple[float, ...]
    ) -> None:
        name = scored.group.prompt.group_id
        lost: RoutesLost | None = None
        routes: tuple[bytes, ...] | None = None
        try:
            routes = await self._routes.fetch(scored.group)
        except Rejected as err:
            await session.bury(delivery, str(err))
            return
        except RoutesLost as err:
            lost = err
        entry = self._books.group(name)
        assert entry is not None
        if entry.state != "open":  # dropped while the routes were on their way
            await self._refuse_again(session, delivery, scored, entry)
        elif lost is not None:
            log.warning("routes_lost", group_id=name, cause=str(lost))
            await self._drop_arrived(session, delivery, scored, Unusable("routes_lost", rewards))
        else:
            self._kept[name] = KeptGroup(delivery.entry_id, scored, rewards, routes)
            if self._recording is not None and routes is not None:
                self._recording.keep_routes(name, routes)

    def _checked(self, prompt: PromptGroup) -> Group:
        """The books' entry of the group, if the prompt is the one that was drawn."""
        if prompt.job_id != self._source.job_id:
            raise Rejected(f"{prompt.group_id} belongs to job {prompt.job_id}")
        entry = self._books.group(prompt.group_id)
        if entry is None or entry.state == "skipped":
            raise Rejected(f"{prompt.group_id} was never drawn")
        drawn = self._source.drawn(entry.draw, min_policy_version=entry.min_policy_version)
        if prompt.draw != entry.draw or prompt.num_samples != drawn.num_samples:
            raise Rejected(f"{prompt.group_id}: draw or number of samples is not what was asked")
        if not np.array_equal(prompt.prompt_token_ids, drawn.prompt_token_ids):
            raise Rejected(f"{prompt.group_id}: the prompt's tokens are not those that were drawn")
        return entry

    def _check_rollouts(self, scored: ScoredGroup) -> None:
        for rollout in scored.group.rollouts:
            ids = rollout.response_token_ids
            if len(ids) and not (ids.min() >= 0 and ids.max() < self._source.vocab_size):
                raise Rejected(
                    f"{rollout.rollout_id}: token ids from {ids.min()} to {ids.max()}, "
                    f"the vocabulary has {self._source.vocab_size}"
                )
            if len(ids) > (most := self._source.job.sampling.max_response_tokens):
                raise Rejected(
                    f"{rollout.rollout_id}: {len(ids)} response tokens, the job allows {most}"
                )
            newest = max((span.policy_version for span in rollout.version_spans), default=0)
            if newest > self._progress.policy_version:
                raise Rejected(
                    f"{rollout.rollout_id}: sampled by version {newest}, the newest one is "
                    f"{self._progress.policy_version}"
                )

    async def _refuse_again(
        self, session: Session, delivery: Delivery, scored: ScoredGroup, entry: Group
    ) -> None:
        """Ack what was settled before: a duplicate, or the first arrival of a dropped group.

        What the latter earned counts like any other reward: only so is the raw curve unbiased.
        """
        rewards = graded_rewards(scored, job=self._source.job)
        is_late = entry.state == "dropped" and not entry.arrived
        if is_late and self._recording is not None:
            self._recording.keep_group(scored)  # first: a recording lacks nothing that is counted
        if is_late and self._books.note_late(entry.group_id, rewards):
            log.info("late_group_ignored", group_id=entry.group_id, reason=entry.reason)
            self._settled.labels("late").inc()
        else:
            event = self._events(
                "duplicate_refused", group_id=entry.group_id, settled_as=entry.state
            )
            self._record.note(event)
            self._settled.labels("duplicate").inc()
        await session.ack([delivery.entry_id])
        if entry.state != "open":  # of one that is held the same key may be needed again
            await self._routes.forget([scored.group])

    async def _drop_arrived(
        self, session: Session, delivery: Delivery, scored: ScoredGroup, verdict: Unusable
    ) -> None:
        name = scored.group.prompt.group_id
        event = self._events("group_dropped", **dropped_facts(scored, verdict))
        self._books.drop_group(name, reason=verdict.reason, event=event, rewards=verdict.rewards)
        self._record.flush_journal()
        self._settled.labels(verdict.reason).inc()
        self._feeder.forget([name])
        await session.ack([delivery.entry_id])
        await self._routes.forget([scored.group])
        await self._feeder.fill()

    def _outdated(self) -> list[Group]:
        oldest = self._admission.oldest_trainable(self._progress)
        names = [name for name, group in self._kept.items() if (group.oldest_version or 0) < oldest]
        return [entry for name in names if (entry := self._books.group(name))]

    def _turn(self, group: KeptGroup) -> tuple[int, int]:
        is_ordered = bool(self._source.job.deterministic)
        return 0 if is_ordered else group.oldest_version or 0, group.draw

    def _is_awaited(self) -> bool:
        """Deterministic jobs choose only once all that was drawn is there."""
        return bool(self._source.job.deterministic) and self._books.num_open() > len(self._kept)

    def _bound_hit(self, began_s: float) -> str | None:
        """In words, if the step must do with what is there."""
        sampling = self._source.job.sampling
        unusable = self._books.num_unusable_during(self._progress.step + 1)
        settled = unusable + len(self._kept)
        if settled >= (most := self._admission.max_settled_per_step()):
            return f"{most} groups (sampling.max_redraws x groups_per_step) were settled"
        waited_s = time.monotonic() - began_s
        if sampling.max_wait_s is not None and waited_s >= sampling.max_wait_s:
            return f"sampling.max_wait_s = {sampling.max_wait_s:g} is over"
        share = len(self._kept) / max(1, settled)
        if settled >= self._admission.groups_per_step and share < sampling.min_usable_share:
            return (
                f"{len(self._kept)} of {settled} groups are usable, less than "
                f"sampling.min_usable_share = {sampling.min_usable_share:g}"
            )
        return None

    def _be_short(self, bound: str) -> None:
        """Go on with a smaller step, or raise `StepStarved` with the reasons."""
        step, have = self._progress.step + 1, len(self._kept)
        reasons = self._books.reasons_during(step)
        told = ", ".join(f"{number} {reason}" for reason, number in reasons.items()) or "none"
        if not have:
            raise StepStarved(f"step {step}: {bound} and none can be trained; dropped: {told}")
        wanted = self._admission.groups_per_step
        if self._source.job.sampling.when_short == "stop":
            raise StepStarved(
                f"step {step}: {bound} and {have} of {wanted} can be trained "
                f"(sampling.when_short = 'stop'); dropped: {told}"
            )
        self._record.note(
            self._events("step_short", step=step, groups=have, wanted=wanted, reasons=reasons)
        )
        log.info("step_short", step=step, groups=have, wanted=wanted, bound=bound)
