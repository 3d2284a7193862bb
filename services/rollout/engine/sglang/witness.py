"""A prompt that the server has cached under the old weights and must not know under the new ones.

Scores from the first token on never read the prefix cache, so the probe alone would not see a
prefix that was kept. The witness is scored before the load, and so cached. Afterwards its end is
asked for on top of whatever the server still has of its beginning: that must be nothing, as far as
the server says, and the scores those of a prompt computed anew.
"""

from collections.abc import Sequence

import numpy as np

from services.rollout.engine.sglang.client import SGLangClient
from services.rollout.engine.sglang.generation import SAME_SCORES, score_body, scores_of
from shared.errors import WeightsCorrupt


class PrefixKept(WeightsCorrupt):
    """The server samples on top of what older weights have computed."""


def witness_of(sequences: Sequence[list[int]], *, page_size: int, most: int) -> list[int]:
    """Tokens long enough to be cached: a server caches whole pages, and no more than `most`."""
    tokens = [token for one in sequences for token in one]
    first = list(sequences[0])
    wanted = min(most, 2 * page_size)
    if len(first) >= wanted:
        return first
    return (tokens * (wanted // len(tokens) + 1))[:wanted]


async def cache_witness(client: SGLangClient, tokens: list[int], *, timeout_s: float) -> None:
    """Have the server compute the witness, and so keep its prefix."""
    await client.score(score_body([tokens], call_id="witness"), timeout_s=timeout_s)


async def check_forgotten(
    client: SGLangClient, tokens: list[int], *, vocab_size: int, timeout_s: float
) -> None:
    """`PrefixKept` when any server behind `client` scores the end on top of an old beginning."""
    start = len(tokens) - 1 - len(tokens) // 4
    body = score_body([tokens], call_id="witness-end", start=start)
    ends = await client.generate_by_each(body, timeout_s=timeout_s)
    body = score_body([tokens], call_id="witness-anew")
    anew = await client.generate_by_each(body, timeout_s=timeout_s)
    for (end,), (whole,) in zip(ends, anew, strict=True):
        if num := int(end["meta_info"].get("cached_tokens") or 0):
            raise PrefixKept(
                f"{num} of {len(tokens)} tokens cached under the version before were kept"
            )
        found = scores_of(end, tokens[start:], vocab_size=vocab_size)
        expected = scores_of(whole, tokens, vocab_size=vocab_size)[start:]
        delta = float(np.abs(found - expected).mean())
        if not delta <= SAME_SCORES:
            raise PrefixKept(
                f"a prompt that the version before had cached is scored with mean |delta log p| "
                f"{delta:.3g} to the same prompt computed anew"
            )
