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
    layout = job.layout
    layout.stage_layers(architecture.num_hidden_layers)
    for field, size, what, number in shared_out(layout, architecture):
        if number % size:
            raise ValueError(f"actor.parallel.{field} {size} does not divide {what} {number}")
    _check_mtp(job, architecture)
    _check_rows(job, architecture)
    if job.actor.precision == "fp8":
        _check_blocks(layout, architecture, "actor.precision must be dtype")
    elif job.actor.quantisation != "none" and architecture.weight_format in ("fp8", "fp4"):
        _check_blocks(layout, architecture, "actor.quantisation must be none")


def shared_out(layout: Layout, arch: Architecture) -> Iterator[tuple[str, int, str, int]]:
    """Field, its size, what it must divide, and how many of that there are."""
    yield "tensor", layout.tensor, "num_attention_heads", arch.num_attention_heads
    yield "tensor", layout.tensor, "o_groups", arch.o_groups
    yield "tensor", layout.tensor, "vocab_size", arch.vocab_size
    yield "tensor", layout.tensor, "moe_intermediate_size", arch.moe_intermediate_size
    yield "expert", layout.expert, "n_routed_experts", arch.n_routed_experts
    yield "expert_tensor", layout.expert_tensor, "moe_intermediate_size", arch.moe_intermediate_size


def _check_mtp(job: Job, arch: Architecture) -> None:
    weight, layout = job.actor.mtp_loss_weight, job.layout
    if weight and not arch.num_nextn_predict_layers:
        raise ValueError(
            f"actor.mtp_loss_weight {weight:g}: the model has no MTP block "
            f"(num_nextn_predict_layers is 0)"
        )
    if weight and layout.context > 1:
        raise ValueError(
            f"actor.mtp_loss_weight {weight:g} needs actor.parallel.context 1, not "
            f"{layout.context}: an MTP block reads the next rank's first tokens"
        )


def _check_rows(job: Job, arch: Architecture) -> None:
    """The longest sample must fit the budget with its padding."""
    layout, alignment = job.layout, row_alignment(job.layout, arch)
    padded = -(-job.max_sample_tokens // alignment) * alignment
    budget = job.actor.max_tokens_per_gpu * layout.context
    if alignment > ROW_ALIGNMENT and padded > budget:
        raise ValueError(
            f"a sample of {job.max_sample_tokens} tokens is padded to {padded} (a multiple of "
            f"{alignment}: whole compressor blocks on each of {layout.context} context-parallel "
            f"ranks), above actor.max_tokens_per_gpu x context = {budget}"
        )


def _check_blocks(layout: Layout, arch: Architecture, remedy: str) -> None:
    """Ranks that round weights must hold whole blocks, which share one scale."""
    widths = (
        ("tensor", layout.tensor, "query", arch.num_attention_heads * arch.head_dim),
        ("tensor", layout.tensor, "output group", arch.o_groups * arch.o_lora_rank),
        ("tensor", layout.tensor, "shared expert", arch.moe_intermediate_size),
        ("expert_tensor", layout.expert_tensor, "expert", arch.moe_intermediate_size),
    )
    for field, size, what, width in widths:
        if size > 1 and (width // size) % QUANT_BLOCK:
            raise ValueError(
                f"actor.parallel.{field} {size} cuts the {what} width {width} inside blocks of "
                f"{QUANT_BLOCK} that share a scale, so {remedy}"
            )
