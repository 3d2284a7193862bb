"""One job from its announcement to its end: what happens when, and nothing else.

    restore ─> publish ─> [ feed ─> collect ─> commit ─> train ─> publish ─> evaluate, save ] ─> end
                 ^            beside it: events, servers, evaluations, lost work             │
                 └──────────────────────────── a restart begins here ────────────────────────┘

A batch is durable before it is trained, and its messages are acked after. So a process that dies at
any line leaves books from which the next one goes on.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

import structlog

from services.trainer.announcements import announce_active, announce_finished, let_expire
from services.trainer.assembly import Parts
from services.trainer.batches import KeptGroup, batch_facts, build_batch
from services.trainer.beside import running_beside
from services.trainer.collector import StepStarved
from services.trainer.events import follow_events
from services.trainer.held_policy import HeldPolicy
from services.trainer.keeper import StepRefused
from services.trainer.publisher import VersionRefused
from services.trainer.stopwatch import Stopwatch
from shared.errors import DeadlineExceeded, TandemError
from shared.messages import TrainingBatch
from shared.registry import live_replicas
from shared.tasks import end
from shared.telemetry import gauge, histogram

log = structlog.get_logger()
VERSION_NOTE = "policy_version"  # of the books: set where a replay made other weights
T = TypeVar("T")
EndState = Literal["finished", "failed", "cancelled", "paused"]


class JobPaused(TandemError):
    """The job stops here and can be resumed; the text says why."""


class Conductor:
    """Runs one job. `on_point` is told each point where a crash would be interesting."""

    def __init__(self, parts: Parts, *, on_point: Callable[[str], None] = lambda _: None) -> None:
        self.parts = parts
        self.pause_asked = asyncio.Event()
        self._on_point = on_point
        self.policy = HeldPolicy(parts)
        self._eval_request: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Train to the end; cancel it to stop at once. Raises `JobPaused`, or what went wrong."""
        p = self.parts
        document = p.job.model_dump(mode="json")
        p.record.note(p.events("job_started", job=document, step=p.books.last_step()))
        await p.preflight.check_memory()
        await self._announce()
        await self._restore()
        workers = (self._follow, p.collector.run, self._offer, p.evals.run, self._watch)
        async with running_beside(workers, goodbye_s=p.config.goodbye_s):
            await self._start_publishing()
            await p.watch.audit()
            while p.progress.steps_left:
                self._obey_pause()
                await self._unless_paused(p.rollback.wait())
                await self._step()
            await self._finish()

    async def close(self, ended: EndState | None, *, error: str | None = None) -> None:
        """Stop what runs. `ended` is the job's last state; None leaves it active for a restart."""
        p = self.parts
        if self._eval_request is not None:
            await end(self._eval_request)
        if ended == "paused":
            await self._save_for_later()
        await p.keeper.close()
        if ended is not None:
            seconds = time.time() - self._first_start_s()
            p.record.note(p.events("job_finished", state=ended, error=error, seconds=seconds))
            await announce_finished(p.redis, job_id=p.job_id, job=p.job, trainer_url=p.trainer_url)
            if ended != "paused":
                await let_expire(p.redis, p.job_id)
        p.record.close()
        p.books.close()

    # One step

    async def _step(self) -> None:
        p = self.parts
        watch = Stopwatch()
        await p.feeder.fill()
        with watch.part("wait"):
            groups = await self._collect()
        with watch.part("pack"):
            step = await self._commit(groups)
        if p.admission.max_lag == 0:  # what is still out was asked of a version that is now old
            await p.collector.drop(p.books.open_groups(), reason="surplus")
        await p.feeder.fill()
        if p.drift.is_due(step):
            with watch.part("attribute"):
                await self._attribute(step)
        result = await self._train(step)
        self._on_point("trained")
        await p.collector.finish(groups)
        self._on_point("acked")
        with watch.part("export"):
            await p.exporter.export(p.progress.policy_version)
        self._on_point("exported")
        with watch.part("publish"):
            await self._publish()
        self._on_point("published")
        with watch.part("checkpoint"):
            await self._save_if_due()
        self._on_point("saved")
        self._tell_step(step, watch)
        self._on_point("told")
        self._check_bounds(result)

    async def _collect(self) -> list[KeptGroup]:
        deadline_s = self.parts.job.bounds.step_deadline_s
        try:
            return await self._unless_paused(self.parts.collector.take(deadline_s=deadline_s))
        except DeadlineExceeded as err:
            if self.parts.rollback.is_on:  # nobody samples for training meanwhile
                await self._unless_paused(self.parts.rollback.wait())
                return await self._collect()
            where = await self._whereabouts()
            raise JobPaused(f"{err} (bounds.step_deadline_s). {where}") from err
        except StepStarved as err:
            raise JobPaused(str(err)) from err

    async def _commit(self, groups: Sequence[KeptGroup]) -> int:
        """Make the batch durable; from here on its groups count as trained."""
        p = self.parts
        step = p.progress.step + 1
        trained = p.progress.policy_version
        batch = build_batch(groups, job=p.job, job_id=p.job_id, step=step, policy_version=trained)
        dropped = p.books.dropped_during(step)
        facts = batch_facts(
            batch, groups, reward_sum=dropped.reward_sum, num_rewards=dropped.num_rewards
        )
        self._on_point("packed")
        await asyncio.to_thread(
            p.books.commit_batch,
            step,
            body=batch.pack(),
            group_ids=batch.group_ids,
            policy_version=trained + 1,
            batch_facts=facts,
        )
        p.exporter.settle_probe(batch)
        p.progress.step = step
        p.progress.policy_version = trained + 1
        p.progress.usable_share = p.books.usable_share()
        self._on_point("committed")
        return step

    async def _attribute(self, step: int) -> None:
        body = await asyncio.to_thread(self.parts.books.redo_body, step)
        await self.parts.drift.tell(await asyncio.to_thread(TrainingBatch.unpack, body))

    async def _train(self, step: int) -> dict[str, Any]:
        try:
            result = await self.parts.keeper.train(step)
        except StepRefused as err:
            self._undo(err)
            raise JobPaused(str(err)) from err
        self.policy.version = self.parts.progress.policy_version
        self.parts.books.keep_result(step, result)
        return result

    def _undo(self, refused: StepRefused) -> None:
        """The ranks are where they were before the step; so are the books, but for its groups."""
        p = self.parts
        dropped = [
            p.events("group_dropped", group_id=group.group_id, reason="refused")
            for group in p.books.groups_of_step(refused.step)
        ]
        p.books.refuse_step(refused.step, reason="refused", events=dropped)
        p.record.flush_journal()
        self._read_progress()

    async def _publish(self) -> None:
        """Offer the version; strictly on-policy jobs also wait until it is served."""
        p = self.parts
        version = p.progress.policy_version
        await self._pin_evaluated()
        await p.publisher.publish(version)
        if p.admission.max_lag == 0 and not p.rollback.is_on:
            deadline_s = p.job.update.deadline_s
            serving = p.publisher.wait_served(version, deadline_s=deadline_s)
            if await self._unless_paused(serving):
                grace_s = p.config.settle_grace_s
                await p.publisher.wait_settled(version, grace_s=grace_s)
        if p.evals.due(p.progress.step, version):
            asking = p.evals.request(p.progress.step, version, p.publisher)
            self._eval_request = asyncio.create_task(asking, name=f"eval of {version}")
        p.progress.published_version = version
        await p.feeder.fill()

    async def _pin_evaluated(self) -> None:
        """Before there is another version, a server must be held at one that is to be evaluated."""
        if self._eval_request is not None:
            await self._unless_paused(_result(self._eval_request))
            self._eval_request = None

    async def _save_if_due(self) -> None:
        p = self.parts
        if p.progress.step % p.job.checkpoint.every_steps == 0 or not p.progress.steps_left:
            wait = not (p.job.checkpoint.background and p.progress.steps_left)
            await p.keeper.save(p.progress.step, wait=wait)

    def _tell_step(self, step: int, watch: Stopwatch | None) -> None:
        """`watch` is None for a step that another process took: nobody knows how long it took."""
        p = self.parts
        made = p.books.steps(step)[0]
        result = made.result or {}
        seconds = watch.total_s if watch else None
        parts = watch.parts if watch else {}
        fields = made.batch_facts | result
        fields |= {
            "step": step,
            "policy_version": made.policy_version,
            "seconds": parts | result.get("seconds", {}),
            "step_seconds": seconds,
            "tokens_per_s": made.batch_facts["tokens"] / seconds if seconds else None,
        }
        p.books.tell_step(step, fields=fields, event=p.events("step", **fields))
        p.record.flush_journal()
        if seconds is not None:
            histogram("trainer_step_seconds", "Duration of a step.").observe(seconds)
        gauge("trainer_step", "Steps taken.").set(step)
        log.info(
            "step_finished",
            step=step,
            reward=fields["reward_raw"],
            delta_logprob=result.get("delta_logprob_mean"),
            seconds=seconds,
        )

    def _check_bounds(self, result: dict[str, Any]) -> None:
        bound = self.parts.job.bounds.max_mean_abs_delta_logprob
        drift = result.get("delta_logprob_mean")
        if drift is not None and not drift <= bound:
            raise JobPaused(
                f"step {self.parts.progress.step}: mean |delta log p| between sampler and trainer "
                f"is {drift:.4g}, above bounds.max_mean_abs_delta_logprob = {bound:g}"
            )

    async def _unless_paused(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result of a wait, which a pause interrupts."""
        task = asyncio.create_task(waiting)
        pausing = asyncio.create_task(self.pause_asked.wait())
        try:
            await asyncio.wait({task, pausing}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._obey_pause()
            return task.result()
        finally:
            await end(pausing)
            await end(task)

    def _obey_pause(self) -> None:
        if self.pause_asked.is_set():
            raise JobPaused("paused on request")

    # Beginning and end

    async def _restore(self) -> None:
        """Bring ranks and books to the same step."""
        p = self.parts
        self._read_progress()
        try:
            await p.keeper.restore()
        except StepRefused as err:
            self._undo(err)
            raise JobPaused(str(err)) from err
        self.policy.version = p.progress.policy_version
        for made in p.books.steps(p.progress.step):
            if made.result is None:  # the batch was durable; now the ranks have trained it
                p.books.keep_result(made.step, await p.keeper.train(made.step))
            if made.told is None:
                self._tell_step(made.step, None)

    def _read_progress(self) -> None:
        p = self.parts
        p.progress.step = p.books.last_step()
        p.progress.usable_share = p.books.usable_share()
        steps = p.books.steps(p.progress.step)
        made = steps[-1].policy_version if steps else 0
        p.progress.policy_version = max(made, int(p.books.read_note(VERSION_NOTE) or 0))

    async def _start_publishing(self) -> None:
        """Offer the restored weights: under their version only if they are still the same bytes."""
        p = self.parts
        version = p.progress.policy_version
        if not await p.exporter.make_sure(version):
            version += 1
            log.warning("replay_made_other_weights", policy_version=version)
            p.books.keep_note(VERSION_NOTE, str(version))
            p.progress.policy_version = self.policy.version = version
            await p.exporter.export(version)
        await self._prove(version)
        await p.evals.restore()
        p.rollback.restore()
        await self._publish()

    async def _prove(self, version: int) -> None:
        """The preflight; nothing is sampled for training before it has passed."""
        try:
            await self._unless_paused(self.parts.preflight.run(version))
        except DeadlineExceeded as err:
            raise JobPaused(f"{err} (preflight.deadline_s)") from err

    async def _finish(self) -> None:
        """Nothing is asked any more; evaluations may still be under way."""
        p = self.parts
        await p.collector.drop(p.books.open_groups(), reason="surplus")
        await self._pin_evaluated()
        await self._unless_paused(p.evals.wait_all())

    async def _save_for_later(self) -> None:
        """Spare a resumed job the replay; the redo log has everything, so this may fail."""
        try:
            await self.parts.keeper.save_if_newer(self.parts.progress.step)
        except TandemError as err:
            log.warning("no_checkpoint_at_pause", error=str(err))

    def _first_start_s(self) -> float:
        started = (body for _, body in self.parts.books.journal(0) if body["name"] == "job_started")
        return float(next(started, {"at_s": time.time()})["at_s"])

    # Beside the steps

    async def _follow(self, stop: asyncio.Event) -> None:
        p = self.parts
        await follow_events(p.redis, p.job_id, p.record, p.evals.on_event, stop)

    async def _offer(self, stop: asyncio.Event) -> None:
        try:
            await self.parts.publisher.run(stop)
        except VersionRefused as err:
            raise JobPaused(str(err)) from err

    async def _watch(self, stop: asyncio.Event) -> None:
        await self.parts.watch.run(stop, announce_again=self._announce_again)

    async def _announce(self) -> None:
        p = self.parts
        await announce_active(p.redis, job_id=p.job_id, job=p.job, trainer_url=p.trainer_url)

    async def _announce_again(self) -> None:
        """Everything that a broker without memory has to be told."""
        await self._announce()
        await self.parts.publisher.announce()
        await self.parts.evals.restore()

    async def _whereabouts(self) -> str:
        """Who a stuck step waits for."""
        p = self.parts
        backlogs = await p.watch.backlogs()
        stages = ", ".join(f"{stage} {number}" for stage, number in backlogs.items())
        servers = "; ".join(f"{name}: {at}" for name, at in p.publisher.describe().items())
        services = ("rollout", "reward", "evaluator")
        alive = {name: len(await live_replicas(p.redis, name)) for name in services}
        return (
            f"Unfinished messages by stage: {stages}. Rollout servers of this job: "
            f"{servers or 'none'}. Live replicas: {alive}. Current version: {p.publisher.current}"
        )


async def _result(task: asyncio.Task[T]) -> T:
    """What the task comes to; it goes on if we are cancelled."""
    return await asyncio.shield(task)
