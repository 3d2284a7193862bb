"""A job without samplers: trains the steps of a recording in their order, by its own settings.

recording ─> batch ─> commit ─> train ─> tell        the same job and seed ─> the same weights

On a CPU bit for bit; where a setting differs (another loss, say), that is the experiment.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from services.trainer.admission import Admission
from services.trainer.assembly import Parts
from services.trainer.batches import KeptGroup, Unusable, dropped_facts, judge
from services.trainer.books import BOOKS_FILE, Books
from services.trainer.entries import Draw
from services.trainer.pausing import JobPaused
from services.trainer.recording import RecordedStep, Recording, RecordingUnreadable
from services.trainer.same_data import check_inputs
from services.trainer.steps import EndState, StepTaker
from services.trainer.stopwatch import Stopwatch
from services.trainer.warm_up import warm_up
from shared.job import expand_path
from shared.messages import ScoredGroup


class Replayer:
    """Runs one train-only job, as a `Conductor` runs one with samplers."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pause_asked = parts.keeper.pause_asked  # where ranks come up it is obeyed, too
        self._steps = StepTaker(parts)
        self._admission = Admission.of(parts.job)
        self.policy = self._steps.policy

    async def run(self) -> None:
        """Train to the end of the recording or of the job; cancel it to stop at once."""
        p = self.parts
        document = p.job.model_dump(mode="json")
        p.record.note(p.events("job_started", job=document, step=p.books.last_step()))
        await asyncio.to_thread(check_inputs, p.books, p.source)
        assert p.job.recording is not None
        recorded_run = expand_path(p.job.recording)
        recording = await asyncio.to_thread(Recording.of_run, recorded_run)
        try:
            recorded = await asyncio.to_thread(_taken, recording, recorded_run)
            last = recorded[-1].step if recorded else 0
            if last < p.job.steps:
                raise RecordingUnreadable(
                    f"{recording.path} has {last} steps, the job asks for {p.job.steps}"
                )
            p.progress.doing = "starting ranks, loading and replaying what they lack"
            await self._steps.restore()
            await warm_up(self._steps, source=p.source, pause_asked=self.pause_asked)
            for step in recorded:
                if not p.progress.step < step.step <= p.job.steps:
                    continue
                if self.pause_asked.is_set():
                    raise JobPaused("paused on request", on_request=True)
                await self._take(step, recording)
        finally:
            recording.close()
        p.progress.doing = f"exporting version {p.progress.policy_version}"
        await p.exporter.export(p.progress.policy_version)

    async def close(
        self, ended: EndState | None, *, error: str | None = None, saves: bool = True
    ) -> None:
        """Stop what runs. `ended` is the job's last state; None leaves it active for a restart. A
        job that pauses `saves` a checkpoint."""
        await self._steps.end(ended, error=error, saves=saves)
        self.parts.close()

    async def _take(self, step: RecordedStep, recording: Recording) -> None:
        watch = Stopwatch()
        self.parts.progress.doing = f"training step {step.step}"
        with watch.part("pack"):
            groups = await asyncio.to_thread(self._judged, step, recording)
            kept = [group for group in groups if isinstance(group, KeptGroup)]
            self._open_slots([group.group_id for group in groups])
            self._drop([group for group in groups if isinstance(group, _LeftOut)])
            batch = self._steps.batch(kept)
            dropped = self.parts.books.close_collection(batch.step)
            dropped = replace(
                dropped,
                reward_sum=dropped.reward_sum + step.reward_sum,
                num_rewards=dropped.num_rewards + step.num_rewards,
            )
            number = await self._steps.commit_groups(batch, kept, dropped)
        result = await self._steps.train(number)
        with watch.part("checkpoint"):
            await self._steps.save_if_due()
        self._steps.tell(number, watch)
        self._steps.check_bounds(result)

    def _judged(self, step: RecordedStep, recording: Recording) -> "list[KeptGroup | _LeftOut]":
        """By this job's settings, which may be others than the recorded job's."""
        job, version = self.parts.job, self.parts.progress.policy_version
        oldest = self._admission.oldest_trainable(self.parts.progress)
        groups: list[KeptGroup | _LeftOut] = []
        for name in step.group_ids:
            entry = self.parts.books.group(name)
            if entry is not None and entry.state == "dropped":  # in a step that was refused
                continue
            scored = recording.group(name)
            verdict = judge(scored, job=job, oldest_trainable=oldest)
            if isinstance(verdict, Unusable):
                groups.append(_LeftOut(scored, verdict))
            else:
                groups.append(KeptGroup(b"", scored, verdict, recording.routes(name)))
        if not any(isinstance(group, KeptGroup) for group in groups):
            reasons = Counter(one.verdict.reason for one in groups if isinstance(one, _LeftOut))
            told = ", ".join(f"{num} {reason}" for reason, num in reasons.items()) or "all dropped"
            raise RecordingUnreadable(
                f"step {step.step}: none of its groups can be trained ({told}; version {version} "
                f"is trained with algorithm.max_lag = {job.algorithm.max_lag})"
            )
        return groups

    def _open_slots(self, group_ids: Sequence[str]) -> None:
        """The books count a group that a killed process opened before it died only once."""
        books = self.parts.books
        first = books.next_draw()
        new = [name for name in group_ids if books.group(name) is None]
        books.record_draws([Draw(first + i, name, 0) for i, name in enumerate(new)])

    def _drop(self, left_out: "Sequence[_LeftOut]") -> None:
        p = self.parts
        for one in left_out:
            verdict = one.verdict
            event = p.events("group_dropped", **dropped_facts(one.scored, verdict))
            p.books.drop_group(
                one.group_id, reason=verdict.reason, event=event, rewards=verdict.rewards
            )
        p.record.flush_journal()


def _taken(recording: Recording, run_dir: Path) -> list[RecordedStep]:
    """The steps that the run took. One is recorded before it is in the books, and forgotten after
    it was undone there; a process that died in between, and was not followed by another, left it.
    """
    steps, path = recording.steps(), run_dir / BOOKS_FILE
    if not path.is_file():  # a recording alone
        return steps
    with closing(Books(path)) as books:
        last = books.last_step()
    return [step for step in steps if step.step <= last]


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A recorded group that this job's settings cannot train."""

    scored: ScoredGroup
    verdict: Unusable

    @property
    def group_id(self) -> str:
        return self.scored.group.prompt.group_id
