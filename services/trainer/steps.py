"""Optimiser steps as facts that survive: a batch is durable before it is trained, told after.

commit ─> train ─> tell        refused by the ranks ─> undone in the books, the job pauses
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import structlog

from services.trainer.assembly import Parts
from services.trainer.batches import KeptGroup, batch_facts, build_batch
from services.trainer.disk import Unwritable, writing
from services.trainer.entries import DroppedGroups
from services.trainer.held_policy import HeldPolicy, version_of
from services.trainer.keeper import StepRefused
from services.trainer.pausing import JobPaused
from services.trainer.recording import RecordedStep
from services.trainer.shown_samples import shown_samples
from services.trainer.stopwatch import Stopwatch
from shared.errors import TandemError
from shared.messages import TrainingBatch
from shared.spans import span
from shared.telemetry import gauge, histogram

log = structlog.get_logger()
EndState = Literal["finished", "failed", "cancelled", "paused"]


class StepTaker:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.policy = HeldPolicy(parts)
        self._latest: tuple[TrainingBatch, Sequence[KeptGroup]] | None = None

    @property
    def is_training(self) -> bool:
        """A job that only samples makes steps of the version that it began with."""
        return self.parts.job.mode != "rollout_only"

    async def restore(self) -> None:
        """Bring ranks and books to the same step."""
        p = self.parts
        self.read_progress()
        if p.progress.steps_left <= 0:
            p.record.note(p.events("no_steps_left", step=p.progress.step, steps=p.job.steps))
        with self.undoing_refused():
            await p.keeper.restore()
        for made in p.books.steps(p.progress.step):
            if made.result is None:  # the batch was durable; now the ranks have trained it
                p.books.keep_result(made.step, await self._result_of(made.step))
            if made.told is None:
                self.tell(made.step, None)

    def read_progress(self) -> None:
        p = self.parts
        p.progress.step = p.books.last_step()
        if p.recording is not None:
            p.recording.forget_after(p.progress.step)
        p.progress.usable_share = p.books.usable_share()
        p.progress.policy_version = version_of(p.progress.step, p.books)

    def batch(self, groups: Sequence[KeptGroup]) -> TrainingBatch:
        """The next step's."""
        p = self.parts
        return build_batch(
            groups,
            job=p.job,
            job_id=p.job_id,
            step=p.progress.step + 1,
            policy_version=p.progress.policy_version,
        )

    async def commit_groups(
        self, batch: TrainingBatch, groups: Sequence[KeptGroup], dropped: DroppedGroups
    ) -> int:
        """Make the groups' batch durable; from here on they count as trained."""
        facts = batch_facts(
            batch, groups, reward_sum=dropped.reward_sum, num_rewards=dropped.num_rewards
        )
        rewards = {group.group_id: group.rewards for group in groups}
        step = await self.commit(batch, facts, dropped, rewards=rewards)
        self._latest = (batch, groups)
        return step

    async def commit(
        self,
        batch: TrainingBatch,
        facts: dict[str, Any],
        dropped: DroppedGroups,
        *,
        rewards: Mapping[str, Sequence[float]] | None = None,
    ) -> int:
        """Make the batch durable."""
        p = self.parts
        made = batch.policy_version + 1 if self.is_training else batch.policy_version
        if p.recording is not None and not batch.supervised:
            p.recording.keep_step(
                RecordedStep(
                    batch.step,
                    batch.policy_version,
                    batch.group_ids,
                    dropped.reward_sum,
                    dropped.num_rewards,
                )
            )
        async with p.feeder.quiet:  # a draw in between would take this step for the next one
            await asyncio.to_thread(
                p.books.commit_batch,
                batch.step,
                body=batch.pack() if self.is_training else None,
                group_ids=batch.group_ids,
                policy_version=made,
                batch_facts=facts,
                rewards=rewards,
            )
            p.progress.step = batch.step
            p.progress.policy_version = made
        p.progress.usable_share = p.books.usable_share()
        return batch.step

    async def train(self, step: int) -> dict[str, Any]:
        with self.undoing_refused(), span("train", "step", step=step):
            result = await self._result_of(step)
        self.parts.books.keep_result(step, result)
        await self._show_samples(step)
        return result

    @contextmanager
    def undoing_refused(self) -> Iterator[None]:
        """Around whatever asks the ranks while the newest batch is not trained: new ranks train it
        first, and may refuse. The step is undone then, and the job pauses."""
        try:
            yield
        except StepRefused as err:
            self._undo(err)
            raise JobPaused(str(err)) from err

    async def _show_samples(self, step: int) -> None:
        """Of a step of this process; what another one collected nobody has here."""
        p, latest = self.parts, self._latest
        self._latest = None
        if latest is None or latest[0].step != step or p.source.tokenizer is None:
            return
        found = await asyncio.to_thread(
            shown_samples, *latest, p.keeper.logprobs, p.source.tokenizer
        )
        await asyncio.to_thread(p.shelf.keep, step, found)

    async def save_if_due(self) -> None:
        p = self.parts
        due = p.progress.step % p.job.checkpoint.every_steps == 0 or not p.progress.steps_left
        if due and self.is_training:
            wait = not (p.job.checkpoint.background and p.progress.steps_left)
            await p.keeper.save(p.progress.step, wait=wait)

    def tell(
        self, step: int, watch: Stopwatch | None, *, load: Mapping[str, Any] | None = None
    ) -> None:
        """`watch` is None for a step that another process took: nobody knows how long it took."""
        p = self.parts
        made = p.books.steps(step)[0]
        result = made.result or {}
        seconds = watch.total_s if watch else None
        parts = watch.parts if watch else {}
        fields = made.batch_facts | result
        fields |= {
            **(load or {}),
            "step": step,
            "policy_version": made.policy_version,
            "seconds": parts | result.get("seconds", {}),
            "step_seconds": seconds,
            "tokens_per_s": made.batch_facts["tokens"] / seconds if seconds else None,
        }
        p.books.tell_step(step, fields=fields, event=p.events("step", **fields))
        p.record.flush_journal()
        p.metrics.flush()
        if seconds is not None:
            histogram("trainer_step_seconds", "Duration of a step.").observe(seconds)
        gauge("trainer_step", "Steps taken.").set(step)
        _note_step(fields)
        log.info(
            "step_finished",
            step=step,
            reward=fields["reward_raw"],
            delta_logprob=result.get("delta_logprob_mean"),
            seconds=seconds,
        )

    def check_bounds(self, result: dict[str, Any]) -> None:
        bound = self.parts.job.bounds.max_mean_abs_delta_logprob
        drift = result.get("delta_logprob_mean")
        if drift is not None and not drift <= bound:
            raise JobPaused(
                f"step {self.parts.progress.step}: mean |delta log p| between sampler and trainer "
                f"is {drift:.4g}, above bounds.max_mean_abs_delta_logprob = {bound:g}"
            )

    async def end(
        self, ended: EndState | None, *, error: str | None = None, saves: bool = True
    ) -> None:
        """End the ranks; `ended` None means that another process goes on with the job. A disk that
        is full may know nothing of it."""
        p = self.parts
        if ended == "paused" and self.is_training and saves:
            await self._save_for_later()
        try:
            with writing(p.run_dir):
                await p.keeper.close()
                if ended is not None:
                    seconds = self._seconds_since_start()
                    end = p.events("job_finished", state=ended, error=error, seconds=seconds)
                    p.record.note(end)
        except Unwritable as err:
            log.warning("end_not_noted", error=str(err))

    async def _save_for_later(self) -> None:
        """Spare a resumed job the replay; the redo log has everything, so this may fail."""
        try:
            await self.parts.keeper.save_if_newer(self.parts.progress.step)
        except TandemError as err:
            log.warning("no_checkpoint_at_pause", error=str(err))

    def _seconds_since_start(self) -> float:
        started = (body for _, body in self.parts.books.journal(0) if body["name"] == "job_started")
        return time.time() - float(next(started, {"at_s": time.time()})["at_s"])

    async def _result_of(self, step: int) -> dict[str, Any]:
        return await self.parts.keeper.train(step) if self.is_training else {}

    def _undo(self, refused: StepRefused) -> None:
        """The ranks are where they were before the step; so are the books, but for its groups."""
        p = self.parts
        dropped = [
            p.events("group_dropped", group_id=group.group_id, reason="refused")
            for group in p.books.groups_of_step(refused.step)
        ]
        p.books.refuse_step(refused.step, reason="refused", events=dropped)
        p.record.flush_journal()
        self.read_progress()


def _note_step(fields: Mapping[str, Any]) -> None:
    """The numbers of the newest step that somebody is woken by."""
    for name, documentation, field in (
        ("trainer_reward", "Mean of all graded samples of the step.", "reward_raw"),
        (
            "trainer_delta_logprob",
            "Mean drift of log-probabilities.",
            "delta_logprob_mean",
        ),
        ("trainer_lag", "Mean versions that its tokens were behind.", "lag_mean"),
        ("trainer_truncated_share", "Share of truncated responses.", "truncated_share"),
        ("trainer_tokens_per_second", "Tokens trained a second.", "tokens_per_s"),
        ("trainer_open_groups", "Groups drawn and neither trained nor dropped.", "open_groups"),
    ):
        if isinstance(value := fields.get(field), int | float):
            gauge(name, documentation).set(value)
    wait_s, step_s = fields["seconds"].get("wait"), fields.get("step_seconds")
    if wait_s is not None and step_s:
        gauge("trainer_wait_share", "Share of the step spent on waiting.").set(wait_s / step_s)
