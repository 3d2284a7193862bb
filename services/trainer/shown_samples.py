"""Samples of the newest steps for people to look at: every token, both sides' log p, the verdict.

Of each step a group as it came and the samples furthest from the trainer are kept, of `KEPT_STEPS`
steps. It is a window, no record (that is `record = true`): a crash may cost the step in progress.
"""

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from services.trainer.batches import KeptGroup
from services.trainer.disk import opened, transaction
from shared.messages import Outcome, TrainingBatch

SAMPLES_FILE = "samples.sqlite"
KEPT_STEPS = 64
FIRST_SAMPLES, FAR_SAMPLES = 8, 4  # of a step
MAX_TOKENS = 16_384  # of one sample; what follows is cut
_MAX_PENDING = 8  # tokens that one character may be spread over

_SCHEMA = """
CREATE TABLE IF NOT EXISTS samples(
    rollout_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL,
    head TEXT NOT NULL,
    body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_step ON samples(step);
"""


class SampleHead(BaseModel):
    """One line of the list. Example: 'demo-1f3a.g000017.3' of step 12."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    rollout_id: str
    """Its name; `explain` takes the same."""
    step: int
    """The step that trained it."""
    policy_version: int
    """The version that was trained with it."""
    replica: str
    """The server that sampled it."""
    reward: float
    """What reached the advantage."""
    advantage: float
    """Of its tokens, before any KL."""
    outcome: Outcome
    """What the grader said."""
    finish_reason: str
    """`stop`, `length` (truncated) or `abort`."""
    num_tokens: int
    """Response tokens."""
    delta_mean: float | None
    """Mean |Δ log p| of its tokens."""
    delta_max: float | None
    """Largest |Δ log p| of its tokens."""
    versions: list[int]
    """Policy versions that sampled it."""


class ShownSample(SampleHead):
    """A sample whole: entry i of each list belongs to response token i."""

    prompt: str
    """The prompt as text."""
    gold: str
    """The right answer."""
    tokens: list[str]
    """Text of each token; empty for the first parts of a character of several tokens."""
    sampler_logprobs: list[float | None]
    """Of the sampled token, by the sampler, at the sampling temperature."""
    trainer_logprobs: list[float | None]
    """Of the same token, by the trainer, before the step."""
    version_of_token: list[int]
    """The policy version that sampled it."""


class SampleShelf:
    """Calls are short and synchronous; one writer, any number of readers."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SAMPLES_FILE
        self._db = opened(
            self._path, _SCHEMA, synchronous="OFF", check_same_thread=False, timeout=10
        )

    @classmethod
    def of_run(cls, run_dir: Path) -> "SampleShelf | None":
        """None for a run that has kept none."""
        return cls(run_dir) if (run_dir / SAMPLES_FILE).is_file() else None

    def close(self) -> None:
        self._db.close()

    def keep(self, step: int, samples: Sequence[ShownSample]) -> None:
        """All of a step; steps that fell out of the window go."""
        heads = set(SampleHead.model_fields)
        rows = [
            (
                one.rollout_id,
                step,
                one.model_dump_json(include=heads),
                zlib.compress(one.model_dump_json().encode(), 1),
            )
            for one in samples
        ]
        with transaction(self._db, self._path):
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", rows)
            self._db.execute("DELETE FROM samples WHERE step <= ?", (step - KEPT_STEPS,))

    def heads(self, *, step: int | None = None, limit: int = 200) -> list[dict[str, Any]]:
        """Newest step first; within it those furthest from the trainer first."""
        rows = self._db.execute(
            "SELECT head FROM samples WHERE ?1 IS NULL OR step = ?1 ORDER BY step DESC,"
            " COALESCE(json_extract(head, '$.delta_mean'), 0) DESC LIMIT ?2",
            (step, limit),
        ).fetchall()
        return [json.loads(head) for (head,) in rows]

    def get(self, rollout_id: str) -> ShownSample | None:
        row = self._db.execute(
            "SELECT body FROM samples WHERE rollout_id = ?", (rollout_id,)
        ).fetchone()
        return ShownSample.model_validate_json(zlib.decompress(row[0])) if row else None


def shown_samples(
    batch: TrainingBatch,
    groups: Sequence[KeptGroup],
    trainer_logprobs: bytes,
    tokenizer: Tokenizer,
) -> list[ShownSample]:
    """Those of a step that are worth a look; log-probabilities are FP32, of all response tokens."""
    samples = [one for one in batch.samples if len(one.sampler_logprobs)]
    flat = np.frombuffer(trainer_logprobs, "<f4")
    ends = np.cumsum([len(one.sampler_logprobs) for one in samples])
    if not samples or len(flat) != ends[-1]:
        return []
    by_sample = np.split(flat, ends[:-1])
    deltas = [
        np.abs(one.sampler_logprobs - trained)
        for one, trained in zip(samples, by_sample, strict=True)
    ]
    means = [_mean(one) for one in deltas]
    far = np.argsort([-math.inf if mean is None else -mean for mean in means], kind="stable")
    chosen = sorted(
        {*range(min(FIRST_SAMPLES, len(samples))), *(int(i) for i in far[:FAR_SAMPLES])}
    )
    found = {
        rollout.rollout_id: (group.scored, place)
        for group in groups
        for place, rollout in enumerate(group.scored.group.rollouts)
    }
    return [
        _shown(batch, index, by_sample[index], samples, found, tokenizer)
        for index in chosen
        if samples[index].rollout_id in found
    ]


def _shown(
    batch: TrainingBatch,
    index: int,
    trained: npt.NDArray[np.float32],
    samples: Sequence[Any],
    found: dict[str, Any],
    tokenizer: Tokenizer,
) -> ShownSample:
    sample = samples[index]
    scored, place = found[sample.rollout_id]
    rollout = scored.group.rollouts[place]
    delta = np.abs(sample.sampler_logprobs - trained)
    versions = [span.policy_version for span in sample.spans for _ in range(span.num_tokens)]
    ids = [int(one) for one in sample.token_ids[sample.num_prompt_tokens :]][:MAX_TOKENS]
    return ShownSample(
        rollout_id=sample.rollout_id,
        step=batch.step,
        policy_version=batch.policy_version,
        replica=scored.group.replica,
        reward=sample.reward,
        advantage=sample.advantage,
        outcome=scored.outcomes[place],
        finish_reason=rollout.finish_reason,
        num_tokens=len(sample.sampler_logprobs),
        delta_mean=_mean(delta),
        delta_max=_number(float(delta.max())),
        versions=sorted(set(versions)),
        prompt=scored.group.prompt.prompt_text,
        gold=scored.group.prompt.gold,
        tokens=token_texts(ids, tokenizer),
        sampler_logprobs=[_number(one) for one in sample.sampler_logprobs[:MAX_TOKENS].tolist()],
        trainer_logprobs=[_number(one) for one in trained[:MAX_TOKENS].tolist()],
        version_of_token=versions[:MAX_TOKENS],
    )


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Text of each token; of a character spread over several, all of it stands at the last one."""
    texts: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < _MAX_PENDING:
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


def _mean(delta: npt.NDArray[np.float32]) -> float | None:
    """None where a token has no number on one of the sides: such a sample is looked at first."""
    return _number(float(delta.mean()))


def _number(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return round(value, 6) if np.isfinite(value) else None
