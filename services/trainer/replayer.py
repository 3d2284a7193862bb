"""A job without samplers: trains the steps of a recording in their order, by its own settings.

recording ─> batch ─> commit ─> train ─> tell        the same job and seed ─> the same weights

On a CPU bit for bit; where a setting differs (another loss, say), that is the experiment.
"""

import asyncio
from collections.abc import Sequence

import structlog

from services.trainer.assembly import Parts
from services.trainer.batches import KeptGroup, Unusable, judge
from services.trainer.entries import Draw, DroppedGroups
from services.trainer.recording import RecordedStep, Recording, RecordingUnreadable
from services.trainer.steps import EndState, JobPaused, StepTaker
from services.trainer.stopwatch import Stopwatch
from services.trainer.warm_up import warm_up
from shared.job import expand_path

log = structlog.get_logger()


class Replayer:
    """Runs one train-only job, as a `Conductor` runs one with samplers."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pause_asked = asyncio.Event()
        self._steps = StepTaker(parts)
        self.policy = self._steps.policy

    async def run(self) -> None:
        """Train to the end of the recording or of the job; cancel it to stop at once."""
        p = self.parts
        document = p.job.model_dump(mode="json")
        p.record.note(p.events("job_started", job=document, step=p.books.last_step()))
        assert p.job.recording is not None
        recording = await asyncio.to_thread(Recording.of_run, expand_path(p.job.recording))
        try:
            recorded = recording.steps()
            last = recorded[-1].step if recorded else 0
            if last < p.job.steps:
                raise RecordingUnreadable(
                    f"{recording.path} has {last} steps, the job asks for {p.job.steps}"
                )
            await self._steps.restore()
            await warm_up(self._steps, source=p.source, pause_asked=self.pause_asked)
            for step in recorded:
                if not p.progress.step < step.step <= p.job.steps:
                    continue
                if self.pause_asked.is_set():
                    raise JobPaused("paused on request")
                await self._take(step, recording)
        finally:
            recording.close()
        await p.exporter.export(p.progress.policy_version)

    async def close(self, ended: EndState | None, *, error: str | None = None) -> None:
        """Stop what runs. `ended` is the job's last state; None leaves it active for a restart."""
        await self._steps.end(ended, error=error)
        self.parts.close()

    async def _take(self, step: RecordedStep, recording: Recording) -> None:
        watch = Stopwatch()
        with watch.part("pack"):
            groups = await asyncio.to_thread(self._usable, step, recording)
            self._open_slots(groups)
            dropped = DroppedGroups(0, step.reward_sum, step.num_rewards)
            number = await self._steps.commit_groups(self._steps.batch(groups), groups, dropped)
        result = await self._steps.train(number)
        with watch.part("checkpoint"):
            await self._steps.save_if_due()
        self._steps.tell(number, watch)
        self._steps.check_bounds(result)

    def _usable(self, step: RecordedStep, recording: Recording) -> list[KeptGroup]:
        """By this job's settings, which may be others than the recorded job's."""
        job, kept = self.parts.job, []
        oldest = step.policy_version - job.algorithm.max_lag
        for name in step.group_ids:
            entry = self.parts.books.group(name)
            if entry is not None and entry.state == "dropped":  # in a step that was refused
                continue
            scored = recording.group(name)
            verdict = judge(scored, job=job, oldest_trainable=oldest)
            if isinstance(verdict, Unusable):
                log.info("recorded_group_left_out", group_id=name, reason=verdict.reason)
            else:
                kept.append(KeptGroup(b"", scored, verdict, recording.routes(name)))
        if not kept:
            raise RecordingUnreadable(f"step {step.step}: none of its groups can be trained")
        return kept

    def _open_slots(self, groups: Sequence[KeptGroup]) -> None:
        """The books count a group that a killed process opened before it died only once."""
        books = self.parts.books
        known = [group for group in groups if books.group(group.group_id)]
        first = books.next_draw()
        new = [group for group in groups if group not in known]
        books.record_draws([Draw(first + i, group.group_id, 0) for i, group in enumerate(new)])
