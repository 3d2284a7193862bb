"""What must travel together does, and integer tables lie on whole words."""

import torch

from services.rollout.engine.sglang.buckets import buckets_of, unit_of


def test_units_are_modules_and_experts_travel_alone() -> None:
    assert unit_of("layers.0.attn.wq_a.weight") == unit_of("layers.0.attn.wkv.scale")
    assert unit_of("layers.0.attn.compressor.wkv.weight") == unit_of("layers.0.attn.attn_sink")
    assert unit_of("layers.2.ffn.experts.7.w1.weight") == unit_of("layers.2.ffn.experts.7.w1.scale")
    assert unit_of("layers.2.ffn.experts.7.w1.weight") != unit_of(
        "layers.2.ffn.experts.8.w1.weight"
    )
    assert unit_of("layers.0.ffn.gate.tid2eid") == unit_of("layers.0.ffn.gate.weight")


def test_buckets_hold_whole_units_widest_dtype_first() -> None:
    tensors = {
        "layers.0.ffn.gate.weight": torch.zeros(3, dtype=torch.bfloat16),
        "layers.0.ffn.gate.tid2eid": torch.zeros(2, dtype=torch.int64),
        "layers.0.ffn.experts.0.w1.weight": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "layers.0.ffn.experts.0.w1.scale": torch.zeros(1, dtype=torch.float8_e8m0fnu),
        "layers.0.ffn.experts.1.w1.weight": torch.zeros(50, dtype=torch.float8_e4m3fn),
    }
    buckets = list(buckets_of(tensors, max_bytes=28))
    assert [[name for name, _ in bucket] for bucket in buckets] == [
        [
            "layers.0.ffn.gate.tid2eid",
            "layers.0.ffn.gate.weight",
            "layers.0.ffn.experts.0.w1.weight",
            "layers.0.ffn.experts.0.w1.scale",
        ],
        ["layers.0.ffn.experts.1.w1.weight"],
    ]
