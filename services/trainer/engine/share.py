"""A rank's share of a batch: all ranks plan for all, and so agree without a word."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core import parallel_state

from services.trainer.packing import MicroBatch, ScoredSequence, context_part, pack
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.layout import row_alignment


@dataclass(frozen=True, slots=True)
class Share:
    """Micro-batches of this rank, and how many they and their tokens are on all ranks."""

    mine: list[MicroBatch]
    micro_batches: int
    padded_tokens: int


def own_share(sequences: Sequence[ScoredSequence], job: Job, architecture: Architecture) -> Share:
    """ValueError for a sequence beyond the token budget."""
    layout = job.layout
    shares = pack(
        sequences,
        max_tokens=job.actor.max_tokens_per_gpu * layout.context,
        alignment=row_alignment(layout, architecture),
        num_ranks=layout.data,
    )
    mine = shares[parallel_state.get_data_parallel_rank()]
    rank = parallel_state.get_context_parallel_rank()
    return Share(
        [context_part(micro, rank, layout.context) for micro in mine],
        sum(len(share) for share in shares),
        sum(micro.num_tokens for share in shares for micro in share),
    )
