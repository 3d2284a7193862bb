"""Supervised steps before the first version is served: pairs in draw order, as durable batches.

pairs ─> batch of likelihoods ─> commit ─> train ─> tell        then the job samples
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.entries import DroppedGroups
from services.trainer.pausing import JobPaused
from services.trainer.prompts import NoPromptFits, PromptSource
from services.trainer.same_data import check_same, digest_of
from services.trainer.steps import StepTaker
from services.trainer.stopwatch import Stopwatch
from shared.data import DataError, draw_order
from shared.data.files import records_of_file
from shared.job import expand_path
from shared.messages import TrainingBatch, TrainingSample


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    response: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of a prompt and of its response, which ends with the stop token unless cut."""

    prompt_ids: list[int]
    response_ids: list[int]


def load_pairs(path: Path) -> list[Pair]:
    """Blocks. Raises `DataError` with file and line for a row without a prompt or a response."""
    pairs = []
    with records_of_file(path) as (name, records):
        for record in records:
            texts = [record.fields.get(key) for key in ("prompt", "response")]
            if not all(isinstance(text, str) and text for text in texts):
                problem = "a pair needs `prompt` and `response`, both text"
                raise DataError(name, problem, line=record.line)
            prompt, response = map(str, texts)
            pairs.append(Pair(prompt, response, record.line))
    if not pairs:
        raise DataError(str(path), "there are no pairs in it")
    return pairs


def fitting_pairs(
    pairs: Sequence[Pair], source: PromptSource
) -> tuple[list[EncodedPair], dict[str, Any]]:
    """Those whose prompts leave room for a response, and what is told of the others, if any.

    Raises `NoPromptFits`. Blocks.
    """
    limit = source.max_prompt_tokens
    encoded = [_encoded(pair, source) for pair in pairs]
    fitting = [one for one in encoded if len(one.prompt_ids) <= limit]
    if not fitting:
        raise NoPromptFits(
            f"none of the {len(pairs)} prompts of warm_up.path fits into {limit} tokens "
            "(sampling.context_length less sampling.max_response_tokens)"
        )
    if len(fitting) == len(encoded):
        return fitting, {}
    sizes = [len(one.prompt_ids) for one in encoded]
    first = next(pair for pair, size in zip(pairs, sizes, strict=True) if size > limit)
    number = len(encoded) - len(fitting)
    told = {"number": number, "first_line": first.line, "longest": max(sizes), "limit": limit}
    return fitting, told


async def warm_up(steps: StepTaker, *, source: PromptSource, pause_asked: asyncio.Event) -> None:
    """Take the supervised steps that are left; each may be the last before a pause."""
    section, progress = steps.parts.job.warm_up, steps.parts.progress
    if section is None or progress.step > section.steps:
        return
    if progress.step < section.steps:
        given = await asyncio.to_thread(load_pairs, expand_path(section.path))
        texts = ((pair.prompt, pair.response) for pair in given)
        found = f"{len(given)} pairs, xxh3 {digest_of(texts)}"
        check_same(steps.parts.books, f"warm_up.path {section.path}", found)
        pairs, skipped = await asyncio.to_thread(fitting_pairs, given, source)
        if skipped:
            steps.parts.record.note(steps.parts.events("pairs_skipped", **skipped))
        while progress.step < section.steps:
            if pause_asked.is_set():
                raise JobPaused("paused on request", on_request=True)
            await _step(steps, pairs, source)
    await steps.parts.keeper.save_reference()  # of a process that died before it could


async def _step(steps: StepTaker, pairs: Sequence[EncodedPair], source: PromptSource) -> None:
    watch, progress = Stopwatch(), steps.parts.progress
    progress.doing = f"training step {progress.step + 1}, supervised"
    with watch.part("pack"):
        batch = supervised_batch(
            pairs, source=source, step=progress.step + 1, policy_version=progress.policy_version
        )
        facts = supervised_facts(batch, stop_token_ids=source.stop_token_ids)
        number = await steps.commit(batch, facts, DroppedGroups(0, 0.0, 0))
    await steps.train(number)
    with watch.part("checkpoint"):
        if number == steps.parts.keeper.reference_step:
            await steps.parts.keeper.save_reference()
        else:
            await steps.save_if_due()
    steps.tell(number, watch)


def supervised_batch(
    pairs: Sequence[EncodedPair], *, source: PromptSource, step: int, policy_version: int
) -> TrainingBatch:
    """A function of (job, step); pairs are drawn like prompts."""
    job, section = source.job, source.job.warm_up
    assert section is not None
    first = (step - 1) * section.pairs_per_step
    seed = job.seed if job.data.shuffle else None
    rows = [draw_order(seed, len(pairs), first + i) for i in range(section.pairs_per_step)]
    return TrainingBatch(
        job_id=source.job_id,
        step=step,
        policy_version=policy_version,
        temperature=job.sampling.temperature,
        samples=[
            _sample(pairs[row], f"warm-up.{step}.{place}", policy_version)
            for place, row in enumerate(rows)
        ],
        group_ids=[],
        supervised=True,
    )


def supervised_facts(batch: TrainingBatch, *, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The facts of a step without groups and rewards, by the names of the `step` event."""
    lengths = [len(sample.sampler_logprobs) for sample in batch.samples]
    cut = [int(sample.token_ids[-1]) not in stop_token_ids for sample in batch.samples]
    return {
        "supervised": True,
        "groups": 0,
        "samples": len(batch.samples),
        "tokens": sum(len(sample.token_ids) for sample in batch.samples),
        "response_tokens": sum(lengths),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "truncated_share": sum(cut) / len(cut) if stop_token_ids else 0.0,
        "reward_raw": None,
        "reward_trained": None,
    }


def _encoded(pair: Pair, source: PromptSource) -> EncodedPair:
    asked = source.job.data.prompt_template.replace("{problem}", pair.prompt)
    ids = source.encode_response(pair.response) + source.stop_token_ids[:1]
    most = source.job.sampling.max_response_tokens
    return EncodedPair(list(source.encode(asked).token_ids), ids[:most])


def _sample(pair: EncodedPair, name: str, policy_version: int) -> TrainingSample:
    return TrainingSample(
        rollout_id=name,
        group_id=name,
        token_ids=np.asarray([*pair.prompt_ids, *pair.response_ids], np.int32),
        num_prompt_tokens=len(pair.prompt_ids),
        sampler_logprobs=np.zeros(len(pair.response_ids), np.float32),
        advantage=1.0,
        reward=0.0,
        oldest_version=policy_version,
    )
