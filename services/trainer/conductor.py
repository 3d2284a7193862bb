"""One job from its announcement to its end: what happens when, and nothing else.

    restore ─> publish ─> [ feed ─> collect ─> commit ─> train ─> publish ─> evaluate, save ] ─> end
                 ^            beside it: events, servers, evaluations, lost work             │
                 └──────────────────────────── a restart begins here ────────────────────────┘

A batch is durable before it is trained, and its messages are acked after. So a process that dies at
any line leaves books from which the next one goes on.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from services.trainer.announcements import announce_active, announce_finished, let_expire
from services.trainer.assembly import Parts
from services.trainer.batches import KeptGroup
from services.trainer.beside import running_beside
from services.trainer.collector import StepStarved
from services.trainer.events import follow_events
from services.trainer.held_policy import VERSION_NOTE
from services.trainer.load import step_load
from services.trainer.pausing import JobPaused
from services.trainer.publisher import NoServerLeft, VersionRefused
from services.trainer.run_environment import keep_environment
from services.trainer.same_data import check_inputs
from services.trainer.steps import EndState, StepTaker
from services.trainer.stopwatch import Stopwatch
from services.trainer.warm_up import warm_up
from shared.errors import DeadlineExceeded
from shared.messages import Event, TrainingBatch
from shared.registry import live_replicas
from shared.tasks import end, first_of

log = structlog.get_logger()
T = TypeVar("T")


class Conductor:
    """Runs one job. `on_point` is told each point where a crash would be interesting."""

    def __init__(self, parts: Parts, *, on_point: Callable[[str], None] = lambda _: None) -> None:
        self.parts = parts
        self.pause_asked = parts.keeper.pause_asked  # where ranks come up it is obeyed, too
        self._nobody_serves = asyncio.Event()
        self._why_nobody_serves = ""
        self._on_point = on_point
        self._steps = StepTaker(parts)
        self.policy = self._steps.policy

    async def run(self) -> None:
        """Train to the end; cancel it to stop at once. Raises `JobPaused`, or what went wrong."""
        p = self.parts
        document = p.job.model_dump(mode="json")
        p.record.note(p.events("job_started", job=document, step=p.books.last_step()))
        p.progress.doing = "comparing its inputs with those that the run began with"
        await asyncio.to_thread(check_inputs, p.books, p.source)
        await p.preflight.check_memory()
        await self._announce()
        p.progress.doing = "starting ranks, loading and replaying what they lack"
        await self._steps.restore()
        await warm_up(self._steps, source=p.source, pause_asked=self.pause_asked)
        workers = (self._follow, p.collector.run, self._offer, self._evaluate, self._watch)
        async with running_beside(workers, goodbye_s=p.config.goodbye_s):
            await self._start_publishing()
            await p.watch.audit()
            while p.progress.steps_left:
                self._obey_pause()
                p.progress.doing = f"waiting to begin step {p.progress.step + 1}"
                await self._unless_paused(p.rollback.wait())
                await p.profiler.at_step(p.progress.step, self._announce)
                await self._step()
            p.progress.doing = "waiting for evaluations"
            await p.profiler.at_end(self._announce)
            await self._finish()

    async def close(
        self, ended: EndState | None, *, error: str | None = None, saves: bool = True
    ) -> None:
        """Stop what runs. `ended` is the job's last state; None leaves it active for a restart. A
        job that pauses `saves` a checkpoint."""
        p = self.parts
        p.profiler.close()
        await self._steps.end(ended, error=error, saves=saves)
        if ended is not None:
            await announce_finished(p.redis, job_id=p.job_id, job=p.job, trainer_url=p.trainer_url)
            if ended != "paused":
                await let_expire(p.redis, p.job_id)
        p.close()

    # One step

    async def _step(self) -> None:
        p = self.parts
        watch = Stopwatch()
        await p.feeder.fill()
        p.progress.doing = f"collecting the groups of step {p.progress.step + 1}"
        with watch.part("wait") as facts:
            groups = await self._collect()
            facts["groups"] = [group.group_id for group in groups]
        is_last_use = self._is_last_use
        with watch.part("pack"):
            if is_last_use:
                await p.collector.drop_kept(reason="surplus")  # they count in this step's reward
            step = await self._commit(groups)
        if is_last_use:
            await p.collector.drop(p.books.open_groups(), reason="surplus")
        await p.collector.drop_outdated()  # their slots serve the next step while this one trains
        await p.feeder.fill()
        if self._steps.is_training and p.drift.is_due(step):
            with watch.part("attribute"):
                await self._attribute(step)
        p.progress.doing = f"training step {step}"
        result = await self._steps.train(step)
        self._on_point("trained")
        await p.collector.finish(groups)
        self._on_point("acked")
        if self._steps.is_training:
            await self._offer_version(watch)
        self._steps.tell(step, watch, load=await self._load())
        self._on_point("told")
        self._steps.check_bounds(result)

    async def _offer_version(self, watch: Stopwatch) -> None:
        p = self.parts
        p.progress.doing = f"exporting version {p.progress.policy_version}"
        with watch.part("export"):
            await p.exporter.export(p.progress.policy_version)
        self._on_point("exported")
        p.progress.doing = f"publishing version {p.progress.policy_version}"
        with watch.part("publish"):
            await self._publish()
        self._on_point("published")
        p.progress.doing = f"saving step {p.progress.step} if that is due"
        with watch.part("checkpoint"):
            await self._steps.save_if_due()
        self._on_point("saved")

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

    @property
    def _is_last_use(self) -> bool:
        """Whether what this step leaves is of no use: of an old version, or there is no other."""
        p = self.parts
        is_outdated = p.admission.max_lag == 0 and self._steps.is_training
        return is_outdated or p.progress.steps_left == 1

    async def _commit(self, groups: Sequence[KeptGroup]) -> int:
        """Make the batch durable; from here on its groups count as trained."""
        p = self.parts
        batch = self._steps.batch(groups)
        dropped = p.books.close_collection(batch.step)
        self._on_point("packed")
        step = await self._steps.commit_groups(batch, groups, dropped)
        p.exporter.settle_probe(batch)
        self._on_point("committed")
        return step

    async def _attribute(self, step: int) -> None:
        body = await asyncio.to_thread(self.parts.books.redo_body, step)
        batch = await asyncio.to_thread(TrainingBatch.unpack, body)
        with self._steps.undoing_refused():
            await self.parts.drift.tell(batch)

    async def _publish(self) -> None:
        """Offer the version; strictly on-policy jobs also wait until it is served."""
        p = self.parts
        version = p.progress.policy_version
        # Before there is another version, a server must be held at one that is to be evaluated.
        await self._unless_paused(p.evals.wait_held())
        await p.publisher.publish(version)
        if p.admission.max_lag == 0 and not p.rollback.is_on:
            deadline_s = p.job.update.deadline_s
            serving = p.publisher.wait_served(version, deadline_s=deadline_s)
            if await self._unless_paused(serving):
                grace_s = p.config.settle_grace_s
                await p.publisher.wait_settled(version, grace_s=grace_s)
        if p.evals.due(p.progress.step, version):
            p.evals.request(p.progress.step, version)
        p.progress.published_version = version
        await p.feeder.fill()

    async def _unless_paused(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result of a wait, which a pause interrupts."""
        task = asyncio.create_task(waiting)
        try:
            while True:
                await first_of(task, self.pause_asked, self._nobody_serves)
                if task.done():
                    return task.result()
                self._obey_pause()
        finally:
            await end(task)

    def _obey_pause(self) -> None:
        """Only where the ranks hold the newest step of the books, and its result is kept: the
        checkpoint of a pause has both. While there are no such ranks their keeper obeys."""
        if self._nobody_serves.is_set():
            raise JobPaused(self._why_nobody_serves)
        if self.pause_asked.is_set():
            raise JobPaused("paused on request", on_request=True)

    # Beginning and end

    async def _start_publishing(self) -> None:
        """Offer the restored weights: under their version only if they are still the same bytes."""
        p = self.parts
        version = p.progress.policy_version
        p.progress.doing = f"exporting version {version}"
        if not await self._unless_paused(p.exporter.make_sure(version)):
            version += 1
            log.warning("replay_made_other_weights", policy_version=version)
            p.books.keep_note(VERSION_NOTE, str(version))
            p.progress.policy_version = version
            await self._unless_paused(p.exporter.export(version))
        p.progress.doing = f"proving version {version} (preflight)"
        await self._prove(version)
        p.progress.doing = f"publishing version {version}"
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
        await self._unless_paused(p.evals.wait_all())

    # Beside the steps

    async def _follow(self, stop: asyncio.Event) -> None:
        p = self.parts

        async def on_event(event: Event) -> None:
            p.load.note(event)
            await keep_environment(p.run_dir, event)
            await p.evals.on_event(event)

        await follow_events(p.redis, p.job_id, p.record, on_event, stop)

    async def _offer(self, stop: asyncio.Event) -> None:
        """Until `stop`; when nobody serves any more the job pauses, after the step under way."""
        try:
            await self.parts.publisher.run(stop)
        except (VersionRefused, NoServerLeft) as err:
            self._why_nobody_serves = str(err)
            self._nobody_serves.set()

    async def _evaluate(self, stop: asyncio.Event) -> None:
        await self.parts.evals.run(stop, self.parts.publisher)

    async def _watch(self, stop: asyncio.Event) -> None:
        await self.parts.watch.run(stop, announce_again=self._announce_again)

    async def _announce(self) -> None:
        p = self.parts
        await announce_active(
            p.redis,
            job_id=p.job_id,
            job=p.job,
            trainer_url=p.trainer_url,
            profile=p.profiler.announced,
        )

    async def _announce_again(self) -> None:
        """Everything that a broker without memory has to be told."""
        await self._announce()
        await self.parts.publisher.announce()
        await self.parts.evals.restore()

    async def _load(self) -> dict[str, Any]:
        """Queues and slots at the end of a step, and what came during it."""
        p = self.parts
        return step_load(
            p.load.take(),
            backlog=await p.watch.backlogs(),
            num_open=p.books.num_open(),
            slots=p.admission.max_open(p.progress),
        )

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
