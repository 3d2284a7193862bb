"""Two ranks share FP8 layers over tensor and expert-tensor parallelism, and the one key = value
head of BF16 layers, for `test_layouts.py`.

    python -m tests.integration.fp8_world OUT

Each rank also computes the whole layer by itself and compares. Float64, where sums in another order
do not move a value over a rounding border: what differs then is a group that was cut.
"""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.trainer.fp8.emulated import EmulatedFp8
from services.trainer.fp8.products import linear, products_as
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.attention import _for_all_heads
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.experts import MixtureOfExperts
from services.trainer.models.deepseek_v4.layers import clamped_swiglu
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from services.trainer.models.deepseek_v4.weights import held_tensors
from shared.parallel import Layout
from shared.quant.activation import UNQUANTISED
from tests.integration.layout_world import fork
from tests.tiny_deepseek_v4 import ALIGNED

LAYER = ALIGNED.num_hidden_layers - 1  # its router is learned
TOKENS, BOUND = 300, 1e-10
FP8 = EmulatedFp8()


def check_rank(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    for name, sizes in (("tp2", {"tensor": 2}), ("etp2", {"tensor": 2, "expert_tensor": 2})):
        store = dist.FileStore(str(out / f"store-{name}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        layout = Layout(world=2, **sizes)
        parallel.initialise(seed=1, layout=layout)
        check(layout)
        check_gradient_of_keys(rank)
        parallel.leave()


def check_gradient_of_keys(rank: int) -> None:
    """Two ranks' heads pull at BF16 keys by numbers that BF16 cannot hold: the sum is in FP32."""
    keys = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    parts = torch.tensor([[1 + 0.9 * 2**-8, 1.0, 3e-5], [-1.0, 2.0, -3e-5]])
    _for_all_heads(keys).backward(parts[rank].clone())  # the sum is made in place
    assert keys.grad is not None
    near(keys.grad.float(), parts.sum(0).bfloat16().float(), "gradient of the shared keys")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(layout: Layout) -> None:
    """Experts of one layer: the shared one is cut by `tensor`, routed ones by `expert_tensor`."""
    config = transformer_config(ALIGNED, layout=layout)
    experts = MixtureOfExperts(config, ALIGNED, layer=LAYER).double()
    layers = nn.ModuleDict({str(LAYER): nn.ModuleDict({"ffn": experts})})
    model = nn.ModuleDict({"layers": layers})
    whole = {}
    for number, held in enumerate(held_tensors(model, arch=ALIGNED)):
        values = random(*held.shape, seed=number) * 0.1
        held.tensor.copy_(held.of(values))
        whole[held.name.removeprefix(f"layers.{LAYER}.ffn.")] = values.requires_grad_()
    mine = random(TOKENS, ALIGNED.hidden_size, seed=100).requires_grad_()
    other = mine.detach().clone().requires_grad_()
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    with products_as(experts, FP8):
        y = experts(mine, ids, Routes(), Trace(), UNQUANTISED)
        y.backward(random(*y.shape, seed=101))
    expected = alone(whole, other)
    expected.backward(random(*y.shape, seed=101))
    near(y, expected, "output")
    assert mine.grad is not None
    assert other.grad is not None
    near(mine.grad, other.grad, "gradient of the input")
    for parameter in experts.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    compared = 0
    for held in held_tensors(model, arch=ALIGNED):
        grad = whole[held.name.removeprefix(f"layers.{LAYER}.ffn.")].grad
        # Tensor-parallel ranks route a part of the tokens each. Unless they share experts, the sums
        # over tokens that give the gradients of these are made of other groups.
        if grad is not None and not (held.is_expert and layout.expert_tensor == 1):
            near(held.tensor, held.of(grad), held.name)
            compared += 1
    assert compared >= 4


def alone(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same layer on one rank, expert by expert."""
    scores = torch.nn.functional.softplus(x @ w["gate.weight"].t()).sqrt()
    chosen = (scores.detach() + w["gate.bias"].detach()).topk(ALIGNED.num_experts_per_tok, -1)
    weights = scores.gather(1, chosen.indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ALIGNED.routed_scaling_factor
    total = _expert(w, "shared_experts", x, None)
    for expert in range(ALIGNED.n_routed_experts):
        rows, slots = (chosen.indices == expert).nonzero(as_tuple=True)
        if len(rows):
            part = _expert(w, f"experts.{expert}", x[rows], weights[rows, slots, None])
            total = total.index_add(0, rows, part)
    return total


def _expert(w: dict[str, Tensor], name: str, x: Tensor, factor: Tensor | None) -> Tensor:
    gate, up = (linear(x, w[f"{name}.{part}.weight"], FP8) for part in ("w1", "w3"))
    hidden = clamped_swiglu(gate, up, ALIGNED.swiglu_limit)
    hidden = hidden if factor is None else hidden * factor
    return linear(hidden, w[f"{name}.w2.weight"], FP8)


def near(ours: Tensor, expected: Tensor, what: str) -> None:
    error = float(((ours - expected).norm() / expected.norm()).detach())
    assert error < BOUND, f"{what}: {error:.1e} of the whole, above {BOUND:g}"


if __name__ == "__main__":
    raise SystemExit(fork(lambda rank: check_rank(rank, Path(sys.argv[1])), 2))
