"""A sampled completion of a run as it was recorded, found by its id; and the versions still held.

The redo log has what the last steps trained: tokens, log-probabilities and the oldest version.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.trainer.books import BOOKS_FILE, Books
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
    reward: float
    step: int | None = None

    @property
    def versions(self) -> list[int]:
        return sorted({span.policy_version for span in self.spans})

    def version_of_each(self) -> list[int]:
        """Of every response token."""
        return [span.policy_version for span in self.spans for _ in range(span.num_tokens)]


def find_sample(run_dir: Path, rollout_id: str) -> RecordedSample:
    """Raises `NotRecorded` saying what the run still has."""
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
    raise NotRecorded(f"{rollout_id} is not recorded in {run_dir}, which holds {held}")


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
