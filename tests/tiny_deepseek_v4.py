"""Small DeepSeek-V4 models for tests, with every tensor random: a zero or a one would hide a fault.

Sizes follow what the tests must be able to see: more entries than the indexer keeps, many indexer
heads (few of them tie at 0), a window that is no ratio, a clamp that binds, YaRN that bends pairs
within a short prompt.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shared.models.deepseek_v4.architecture import Architecture, Yarn
from shared.models.deepseek_v4.names import weight_shapes

FLASH = Architecture(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_nextn_predict_layers=1,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=Yarn(16.0, 65536, 32.0, 1.0),
    max_position_embeddings=1048576,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    num_hash_layers=3,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
).with_format("fp4")

ALIGNED = replace(
    FLASH.with_format("fp32"),
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=256,
    q_lora_rank=256,
    o_groups=2,
    o_lora_rank=128,
    sliding_window=32,
    compress_ratios=(0, 4, 128, 4, 0),
    rope_scaling=Yarn(16.0, 64, 32.0, 1.0),
    max_position_embeddings=4096,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    num_hash_layers=2,
    swiglu_limit=1.0,
)
"""Every quantised matrix is a multiple of 128 and has two groups along K or more."""

SMALL = replace(
    ALIGNED,
    hidden_size=64,
    num_hidden_layers=5,
    num_nextn_predict_layers=0,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_lora_rank=16,
    sliding_window=16,
    compress_ratios=(0, 0, 4, 128, 4),
    rope_scaling=Yarn(4.0, 128, 32.0, 1.0),
    index_head_dim=16,
    index_topk=4,
    moe_intermediate_size=32,
    num_hash_layers=3,
)
"""Nothing aligned to a block; a layer that is both hash routed and overlapping."""

DEMO = replace(
    ALIGNED,
    vocab_size=320,
    hidden_size=128,
    num_nextn_predict_layers=0,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=128,
    o_lora_rank=64,
    sliding_window=8,
    compress_ratios=(0, 4, 8, 4),
    index_head_dim=32,
    index_topk=3,
    moe_intermediate_size=128,
)
"""The shape of the demo policy: pooled blocks of 8."""

UNSCALED = replace(SMALL, rope_scaling=None, compress_ratios=(4, 16, 0, 4, 16), num_hash_layers=1)
"""No YaRN, a compressed first layer, a window of one pooled block."""


def random_weights(arch: Architecture, *, seed: int, spread: float = 1.0) -> dict[str, Tensor]:
    """FP32 weights of every tensor; `spread` scales the matrices."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_weight(name, shape, arch, generator=generator, spread=spread)
        for name, shape in weight_shapes(arch).items()
    }


def random_tokens(arch: Architecture, *, rows: int, length: int, seed: int = 1) -> Tensor:
    """int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, arch.vocab_size, (rows, length), generator=generator)


def random_weight(
    name: str,
    shape: tuple[int, ...],
    arch: Architecture,
    *,
    generator: torch.Generator,
    spread: float = 1.0,
) -> Tensor:
    """FP32 values of one tensor, on the generator's device."""
    device = generator.device
    noise = torch.randn(shape, generator=generator, device=device)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "tid2eid":
        draws = torch.rand(shape[0], arch.n_routed_experts, generator=generator, device=device)
        return draws.argsort(-1)[:, : shape[1]].contiguous()  # distinct experts in a row
    if leaf.endswith("norm") or leaf.endswith("_scale"):
        return 1 + 0.3 * noise
    if leaf.endswith("_base") or leaf in ("ape", "attn_sink"):
        return noise
    if leaf == "bias":
        return 0.3 * noise
    if leaf == "embed":
        return noise
    return spread * noise * shape[-1] ** -0.5
