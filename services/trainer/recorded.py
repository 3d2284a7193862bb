"""A sampled completion of a run as it was recorded, found by its id; and the versions still held.

A recording (`record = true`) has every group that came; the redo log what the last steps took.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.trainer.books import BOOKS_FILE, Books
from services.trainer.recording import RECORDING_FILE, Recording, RecordingUnreadable
from services.trainer.versions import VersionStore
from shared.errors import TandemError
from shared.messages import TrainingBatch, VersionSpan


class NotRecorded(TandemError):
    """No record of the run has that completion."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """T tokens, of which `num_prompt_tokens` were given; R log-probabilities of the others.

    `spans` says which versions sampled them, in order.
    """

    rollout_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    logprobs: list[float]
    spans: list[VersionSpan]
    temperature: float
    reward: float | None  # None: it was not scored
    step: int | None = None

    @property
    def versions(self) -> list[int]:
        return sorted({span.policy_version for span in self.spans})


def find_sample(run_dir: Path, rollout_id: str) -> RecordedSample:
    """Raises `NotRecorded` saying what the run still has."""
    recorded = (run_dir / RECORDING_FILE).is_file()
    if recorded and (found := _in_recording(run_dir, rollout_id)):
        return found
    path = run_dir / BOOKS_FILE
    if not path.is_file():
        raise NotRecorded(f"{run_dir} is no run: it has no {BOOKS_FILE}")
    books, steps = Books(path), []
    try:
        for batch in _batches(books):
            steps.append(batch.step)
            for sample in batch.samples:
                if sample.rollout_id == rollout_id:
                    return RecordedSample(
                        rollout_id=rollout_id,
                        token_ids=[int(token) for token in sample.token_ids],
                        num_prompt_tokens=sample.num_prompt_tokens,
                        logprobs=[float(value) for value in sample.sampler_logprobs],
                        spans=sample.spans,
                        temperature=batch.temperature,
                        reward=sample.reward,
                        step=batch.step,
                    )
    finally:
        books.close()
    held = f"samples of steps {steps[0]} to {steps[-1]}" if steps else "no samples"
    hint = "" if recorded else "; a job that is submitted with --record keeps every sample"
    raise NotRecorded(f"{rollout_id} is not recorded in {run_dir}, which holds {held}{hint}")


def _in_recording(run_dir: Path, rollout_id: str) -> RecordedSample | None:
    recording = Recording.of_run(run_dir)
    try:
        scored = recording.group(rollout_id.rpartition(".")[0])
    except RecordingUnreadable:
        return None
    finally:
        recording.close()
    prompt = scored.group.prompt
    for rollout, outcome in zip(scored.group.rollouts, scored.outcomes, strict=True):
        if rollout.rollout_id == rollout_id and len(rollout.response_token_ids):
            return RecordedSample(
                rollout_id=rollout_id,
                token_ids=[
                    *map(int, prompt.prompt_token_ids),
                    *map(int, rollout.response_token_ids),
                ],
                num_prompt_tokens=len(prompt.prompt_token_ids),
                logprobs=[float(value) for value in rollout.logprobs],
                spans=rollout.version_spans,
                temperature=prompt.sampling.temperature,
                reward=outcome.value if outcome.kind == "score" else None,
            )
    return None


def version_folders(run_dir: Path, versions: list[int]) -> dict[int, Path]:
    """Where each version's shards lie; raises `NotRecorded` naming those that are still held.

    A version that is kept as changes is rebuilt in the run's folder.
    """
    store = VersionStore(run_dir)
    held = store.versions()
    if gone := [version for version in versions if version not in held]:
        names = ", ".join(map(str, held)) or "none"
        raise NotRecorded(f"version {gone[0]} is gone; versions held: {names}")
    for version in versions:
        if not store.is_whole(version):
            store.restore(version)
    return {version: store.path(version) for version in versions}


def _batches(books: Books) -> Iterator[TrainingBatch]:
    for step in books.redo_held():
        yield TrainingBatch.unpack(books.redo_body(step))
