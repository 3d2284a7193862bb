"""Supervised warm-up of the demo policy on worked additions, stopped while there is much to learn.

The held-out suite is sampled every few steps exactly as a server will sample it: FP8 weights,
rounded activations. The first weights whose pass@1 reaches the target are kept; reinforcement
learning does the rest.
"""

import random
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from scripts.arithmetic import MAX_RESPONSE_TOKENS, Addition, last_field
from scripts.byte_tokenizer import EOS, FIRST_BYTE, PAD, encode_bytes
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantise_tensor, quantise_tensor
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import SERVED
from shared.quant.policy import POLICIES, scale_name

log = structlog.get_logger()

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class WarmUp:
    batch_size: int = 128
    learning_rate: float = 1e-3
    ramp_steps: int = 10
    max_steps: int = 240
    measure_from: int = 80
    measure_every: int = 4
    target_pass_at_1: float = 0.3
    balance_rate: float = 0.01
    """Step of a gate's bias towards experts that are used too little (no auxiliary loss)."""


@dataclass(frozen=True, slots=True)
class Measured:
    pass_at_1: float
    pass_at_8: float
    ended_share: float
    """Completions that gave the end token within their budget."""


def warm_up(
    weights: Weights,
    arch: Architecture,
    *,
    train: list[Addition],
    heldout: list[Addition],
    plan: WarmUp,
    seed: int,
) -> int:
    """Train `weights` in place until the held-out pass@1 reaches the target; the steps taken."""
    trained = [tensor.requires_grad_() for name, tensor in weights.items() if is_trained(name)]
    optimizer = torch.optim.AdamW(
        trained, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    rows, rng = _rows(train), random.Random(seed)
    for step in range(1, plan.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * min(1.0, step / plan.ramp_steps)
        batch_BT = rows[rng.sample(range(len(rows)), plan.batch_size)]
        loss, usage = response_loss(weights, arch, batch_BT)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        balance(weights, usage, rate=plan.balance_rate)
        if step >= plan.measure_from and step % plan.measure_every == 0:
            found = measure(stored(weights, arch), arch, heldout, num_samples=4, seed=seed)
            log.info("measured", step=step, loss=loss.item(), pass_at_1=found.pass_at_1)
            if found.pass_at_1 >= plan.target_pass_at_1:
                return step
    raise RuntimeError(f"pass@1 below {plan.target_pass_at_1} after {plan.max_steps} steps")


def is_trained(name: str) -> bool:
    """Tables, selection biases and indexers get no gradient from the loss."""
    return not name.endswith(("tid2eid", "gate.bias")) and ".indexer." not in name


def response_loss(
    weights: Weights, arch: Architecture, batch_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy of the response tokens, and the experts that real tokens used.

    The prompt ends with `=`; usage is the share of choices [E] by the trace name of each router.
    """
    usage: dict[str, Tensor] = {}
    inputs_BS = batch_BT[:, :-1]

    def watch(name: str, tensor: Tensor) -> None:
        if name.endswith("router"):
            chosen_E = (tensor[inputs_BS != PAD] > 0).sum(0)
            usage[name] = chosen_E / chosen_E.sum()

    logits_BSV = Reference(weights, arch).forward(inputs_BS, trace=watch).logits
    is_response_BS = (inputs_BS == FIRST_BYTE + ord("=")).cumsum(1) > 0
    targets_BS = batch_BT[:, 1:].masked_fill(~is_response_BS, PAD)
    loss = functional.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=PAD
    )
    return loss, usage


def balance(weights: Weights, usage: dict[str, Tensor], *, rate: float) -> None:
    """Raise the selection bias of experts used less than their share, lower the others'.

    DeepSeek-V3, section 2.1.2: a constant step by the sign of the load's error.
    """
    for name, share_E in usage.items():
        bias = weights.get(f"{name.removesuffix('router')}ffn.gate.bias")
        if bias is not None:
            bias += rate * torch.sign(1 / len(share_E) - share_E)


def stored(weights: Weights, arch: Architecture) -> Weights:
    """The values that a release keeps of `weights`: quantised and dequantised."""
    kept: Weights = {}
    for name, tensor in weights.items():
        parts = quantise_tensor(name, tensor.detach(), policy=POLICIES[arch.weight_format])
        scale = parts.get(scale_name(name)) if len(parts) > 1 else None
        kept[name] = dequantise_tensor(name, parts[name], scale=scale)
    return kept


def measure(
    weights: Weights, arch: Architecture, problems: list[Addition], *, num_samples: int, seed: int
) -> Measured:
    """pass@1 and, with eight samples or more, pass@8 of completions sampled at temperature 1."""
    texts, ended = sample(weights, arch, problems, num_samples=num_samples, seed=seed)
    right = [
        [last_field(text) == problem.answer for text in texts[i : i + num_samples]]
        for problem, i in zip(problems, range(0, len(texts), num_samples), strict=True)
    ]
    return Measured(
        pass_at_1=sum(map(sum, right)) / len(texts),
        pass_at_8=sum(any(of_problem[:8]) for of_problem in right) / len(right),
        ended_share=ended,
    )


@torch.no_grad()
def sample(
    weights: Weights, arch: Architecture, problems: list[Addition], *, num_samples: int, seed: int
) -> tuple[list[str], float]:
    """Completions, problem by problem, and the share of them that ended by themselves."""
    model, generator = Reference(weights, arch, quant=SERVED), torch.Generator().manual_seed(seed)
    state = model.new_state()
    fed_BS = torch.tensor([encode_bytes(p.prompt) for p in problems for _ in range(num_samples)])
    ended_B, columns = torch.zeros(len(fed_BS), dtype=torch.bool), []
    for _ in range(MAX_RESPONSE_TOKENS):
        probs_BV = model.forward(fed_BS, state=state).logits[:, -1].softmax(-1)
        next_B = torch.multinomial(probs_BV, 1, generator=generator)[:, 0].masked_fill(ended_B, PAD)
        columns.append(next_B)
        ended_B |= next_B == EOS
        fed_BS = next_B.unsqueeze(1)
    return [_text(row) for row in torch.stack(columns, 1).tolist()], float(ended_B.float().mean())


def _rows(train: list[Addition]) -> Tensor:
    """Prompt, worked answer, end token; padded at the end, where a causal model never looks."""
    rows = [[*encode_bytes(p.prompt + p.worked), EOS] for p in train]
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def _text(token_ids: list[int]) -> str:
    ended = token_ids.index(EOS) if EOS in token_ids else len(token_ids)
    data = bytes(t - FIRST_BYTE for t in token_ids[:ended] if 0 <= t - FIRST_BYTE < 256)
    return data.decode(errors="replace")
