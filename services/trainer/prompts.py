"""From a draw's number to what is asked: row, tokens, seed, all a function of (job, draw).

Nothing is remembered, so a group that got lost anywhere can be asked again under its own id.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
from tokenizers import Tokenizer

from shared.chat import EncodedPrompt, encode_prompt
from shared.data import Row, draw_order, load_rows
from shared.errors import TandemError
from shared.job import Job, expand_path
from shared.messages import PromptGroup, SamplingParams
from shared.tokenizer import CheckpointTokenizer


@dataclass(frozen=True, slots=True)
class TooLong:
    """The prompt of a draw leaves no room for a response."""

    row: int
    source: str
    num_tokens: int
    limit: int


class NoPromptFits(TandemError):
    """Not one prompt of the data set fits into the context."""


class DataChanged(TandemError):
    """A data set, the tokenizer or a checkpoint is not the one that the run began with."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The job's prompts in the order of draws."""

    job_id: str
    job: Job
    rows: Sequence[Row]
    encode: Callable[[str], EncodedPrompt]
    encode_response: Callable[[str], list[int]]
    stop_token_ids: list[int]
    vocab_size: int
    tokenizer: Tokenizer | None = None

    @classmethod
    def load(cls, job_id: str, job: Job, *, left: threading.Event | None = None) -> "PromptSource":
        """Read data set and tokenizer; blocks until that is done or `left`. Raises `DataError`,
        OSError for a checkpoint, or ValueError for a chat format that its tokenizer does not have.
        """
        tokenizer = CheckpointTokenizer.load(expand_path(job.model.rollout_checkpoint))
        source = cls(
            job_id,
            job,
            [] if job.mode == "train_only" else load_rows(job.data, left=left),
            partial(
                encode_prompt,
                prompt_format=job.data.prompt_format,
                tokenizer=tokenizer,
                system=job.data.system,
            ),
            tokenizer.encode_plain,
            list(tokenizer.stop_token_ids),
            tokenizer.vocab_size,
            tokenizer.tokenizer,
        )
        if source.rows:  # a recording brings its prompts as tokens
            source.encode(source.rows[0].prompt)
        return source

    @property
    def max_prompt_tokens(self) -> int:
        return self.job.max_sample_tokens - self.job.sampling.max_response_tokens

    def row_of(self, draw: int) -> Row:
        seed = self.job.seed if self.job.data.shuffle else None
        return self.rows[draw_order(seed, len(self.rows), draw)]

    def group(self, draw: int, *, min_policy_version: int) -> PromptGroup | TooLong:
        row = self.row_of(draw)
        prompt = self.encode(row.prompt)
        token_ids = prompt.token_ids
        if len(token_ids) > self.max_prompt_tokens:
            return TooLong(row.index, row.source, len(token_ids), self.max_prompt_tokens)
        sampling = self.job.sampling
        return PromptGroup(
            job_id=self.job_id,
            group_id=group_id(self.job_id, draw),
            draw=draw,
            prompt_token_ids=np.asarray(token_ids, np.int32),
            prompt_text=prompt.text,
            gold=row.gold,
            grader=self.job.reward.grader,
            num_samples=sampling.samples_per_prompt,
            extra_samples=sampling.extra_samples,
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_response_tokens=sampling.max_response_tokens,
                stop_token_ids=self.stop_token_ids,
            ),
            seed=draw_seed(self.job.seed, draw),
            min_policy_version=min_policy_version,
        )

    def drawn(self, draw: int, *, min_policy_version: int) -> PromptGroup:
        """A group that was opened, exactly as it was asked. Raises `DataChanged` if the prompt of
        its draw would not be asked any more."""
        found = self.group(draw, min_policy_version=min_policy_version)
        if isinstance(found, TooLong):
            raise DataChanged(
                f"{group_id(self.job_id, draw)} was asked, and its prompt ({found.source}) has "
                f"{found.num_tokens} tokens now, {found.limit} fit: data or tokenizer have changed"
            )
        return found

    def probe_sequences(self, number: int, *, max_tokens: int = 128) -> list[list[int]]:
        """Token ids of the file's first prompts of two tokens or more, cut to `max_tokens`.

        And to the context: a prompt that is skipped for its length must not fail the probe.
        """
        max_tokens = min(max_tokens, self.job.sampling.context_length)
        found: list[list[int]] = []
        for row in self.rows:
            if len(found) == number:
                break
            if len(token_ids := self.encode(row.prompt).token_ids[:max_tokens]) >= 2:
                found.append(token_ids)
        return found


def group_id(job_id: str, draw: int) -> str:
    return f"{job_id}.g{draw:06d}"


def draw_seed(seed: int, draw: int) -> int:
    """53 bits, so that it stays exact in JSON."""
    digest = blake2b(b"%d/%d" % (seed, draw), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11
