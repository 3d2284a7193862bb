"""Which layouts a DeepSeek-V4 model can have, and how its rows are padded for one; no torch.

`check_layout` refuses what cannot run, with the reason, before any process starts.
"""

import math
from collections.abc import Iterator

from shared.job import Job
from shared.models.deepseek_v4.architecture import QUANT_BLOCK, Architecture
from shared.parallel import Layout

ROW_ALIGNMENT = 8  # rows are padded to multiples of this, so that few distinct shapes occur


def row_alignment(layout: Layout, architecture: Architecture) -> int:
    """Rows are padded to multiples of this many tokens.

    Each context-parallel rank then has whole compressor blocks of every row, and tensor-parallel
    ranks equal parts of a micro-batch's tokens.
    """
    if layout.context == 1:
        return math.lcm(ROW_ALIGNMENT, layout.tensor)
    block = math.lcm(*(ratio for ratio in architecture.compress_ratios if ratio))
    return layout.context * math.lcm(ROW_ALIGNMENT, block, layout.tensor)


def check_layout(job: Job, architecture: Architecture) -> None:
    """ValueError, naming field, value and bound, for a layout that this model cannot have."""
    actor = job.actor
    found = misfits(
        job.layout,
        architecture,
        mtp_loss_weight=actor.mtp_loss_weight,
        sample_tokens=job.max_sample_tokens,
        max_tokens=actor.max_tokens_per_gpu,
        fp8=actor.precision == "fp8",
        rounds=actor.quantisation != "none",
    )
    if problem := next(found, None):
        raise ValueError(problem)


def misfits(
    layout: Layout,
    architecture: Architecture,
    *,
    mtp_loss_weight: float,
    sample_tokens: int,
    max_tokens: int,
    fp8: bool,
    rounds: bool,
) -> Iterator[str]:
    """Why this model cannot be trained in this layout: `fp8` by its products, `rounds` by what the
    sampler does to weights. `sample_tokens` has the longest sample, `max_tokens` a micro-batch."""
    try:
        layout.stage_sizes(architecture.num_hidden_layers)
    except ValueError as err:
        yield str(err)
    for field, size, what, number in shared_out(layout, architecture):
        if number % size:
            yield f"actor.parallel.{field} {size} does not divide {what} {number}"
    yield from _mtp_misfits(mtp_loss_weight, layout, architecture)
    yield from _row_misfits(sample_tokens, max_tokens, layout, architecture)
    if fp8:
        yield from _cut_blocks(layout, architecture, "actor.precision must be dtype")
    elif rounds and architecture.weight_format in ("fp8", "fp4"):
        yield from _cut_blocks(layout, architecture, "actor.quantisation must be none")


def shared_out(layout: Layout, arch: Architecture) -> Iterator[tuple[str, int, str, int]]:
    """Field, its size, what it must divide, and how many of that there are."""
    yield "tensor", layout.tensor, "num_attention_heads", arch.num_attention_heads
    yield "tensor", layout.tensor, "o_groups", arch.o_groups
    yield "tensor", layout.tensor, "vocab_size", arch.vocab_size
    yield "tensor", layout.tensor, "moe_intermediate_size", arch.moe_intermediate_size
    yield "expert", layout.expert, "n_routed_experts", arch.n_routed_experts
    yield "expert_tensor", layout.expert_tensor, "moe_intermediate_size", arch.moe_intermediate_size


def _mtp_misfits(weight: float, layout: Layout, arch: Architecture) -> Iterator[str]:
    if weight and not arch.num_nextn_predict_layers:
        yield (
            f"actor.mtp_loss_weight {weight:g}: the model has no MTP block "
            f"(num_nextn_predict_layers is 0)"
        )
    if weight and layout.context > 1:
        yield (
            f"actor.mtp_loss_weight {weight:g} needs actor.parallel.context 1, not "
            f"{layout.context}: an MTP block reads the next rank's first tokens"
        )


def _row_misfits(
    sample_tokens: int, max_tokens: int, layout: Layout, arch: Architecture
) -> Iterator[str]:
    """The longest sample must fit the budget with its padding."""
    alignment = row_alignment(layout, arch)
    padded = -(-sample_tokens // alignment) * alignment
    budget = max_tokens * layout.context
    if sample_tokens > budget:
        yield (
            f"a sample of {sample_tokens} tokens exceeds the budget of {max_tokens} tokens on each "
            f"of {layout.context} context ranks"
        )
    elif alignment > ROW_ALIGNMENT and padded > budget:
        yield (
            f"a sample of {sample_tokens} tokens is padded to {padded} (a multiple of "
            f"{alignment}: whole compressor blocks on each of {layout.context} context-parallel "
            f"ranks), above actor.max_tokens_per_gpu x context = {budget}"
        )


def _cut_blocks(layout: Layout, arch: Architecture, remedy: str) -> Iterator[str]:
    """Ranks that round weights must hold whole blocks, which share one scale."""
    widths = (
        ("tensor", layout.tensor, "query", arch.num_attention_heads * arch.head_dim),
        ("tensor", layout.tensor, "output group", arch.o_groups * arch.o_lora_rank),
        ("tensor", layout.tensor, "shared expert", arch.moe_intermediate_size),
        ("expert_tensor", layout.expert_tensor, "expert", arch.moe_intermediate_size),
    )
    for field, size, what, width in widths:
        if size > 1 and (width // size) % QUANT_BLOCK:
            yield (
                f"actor.parallel.{field} {size} cuts the {what} width {width} inside blocks of "
                f"{QUANT_BLOCK} that share a scale, so {remedy}"
            )
