"""Log-probabilities of given tokens, without ever holding logits of more than a few tokens.

Tokens go through the vocabulary matrix in chunks; backward computes each chunk's logits again. The
product is FP32 whatever the weights' dtype; a tensor-parallel rank holds a vocabulary slice.
"""

# N scored positions, D model width, V local vocabulary
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.models.deepseek_v4.layers import row_dots, wide
from shared.models.deepseek_v4.architecture import Architecture

TOKEN_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For every scored position, FP32 `[N]`; both carry gradients."""

    logprobs: Tensor
    entropy: Tensor
    mtp_logprobs: Tensor | None = None  # of the same labels by MTP blocks, summed over these


class OutputHead(ColumnParallelLinear):
    def __init__(self, config: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(
            architecture.hidden_size,
            architecture.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
        )

    def logits(self, x_ND: Tensor) -> Tensor:
        """`[…, V]` FP32 of this rank's vocabulary slice; for tests and short inputs."""
        return torch.nn.functional.linear(wide(x_ND), wide(self.weight))

    def score(
        self, x_ND: Tensor, labels_N: Tensor, temperature: float, *, learns: bool = True
    ) -> TokenScores:
        """Log-probabilities and entropies of `softmax(logits / temperature)` at `labels_N`; without
        `learns` no gradient reaches the vocabulary matrix."""
        slice_ = _Vocabulary(self.tp_group, self.weight.size(0))
        weight = self.weight if learns else self.weight.detach()
        logprobs, entropy = _Score.apply(x_ND, weight, labels_N, temperature, slice_)
        return TokenScores(logprobs, entropy)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """This rank's slice of the vocabulary, and sums and maxima over all slices."""

    group: Any
    size: int

    def sum(self, x: Tensor) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as rows of this slice, and whether they lie in it (elsewhere row 0)."""
        rows = labels - self.group.rank() * self.size
        inside = (rows >= 0) & (rows < self.size)
        return rows.where(inside, 0).unsqueeze(-1), inside


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        vocabulary: _Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(labels.shape, dtype=wide(x).dtype, device=x.device)
        entropy, log_total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for chunk in _chunks(labels):
            found = _score_chunk(x[chunk], weight, labels[chunk], temperature, vocabulary)
            logprobs[chunk], entropy[chunk], log_total[chunk] = found
        ctx.save_for_backward(x, weight, labels, log_total, entropy)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_total, entropy = ctx.saved_tensors
        grad_x = torch.empty_like(x, dtype=wide(x).dtype)
        grad_weight = torch.zeros_like(weight, dtype=grad_x.dtype)
        for chunk in _chunks(labels):
            about = _Chunk(
                x[chunk],
                labels[chunk],
                log_total[chunk],
                entropy[chunk],
                None if grad is None else grad[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )
            grad_logits = _grad_logits(about, weight, ctx.temperature, ctx.vocabulary)
            torch.mm(grad_logits, wide(weight), out=grad_x[chunk])
            grad_weight.addmm_(grad_logits.t(), wide(x[chunk]))
            del grad_logits  # before the next chunk's are made
        ctx.vocabulary.sum(grad_x)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None


def _score_chunk(
    x: Tensor, weight: Tensor, labels: Tensor, temperature: float, vocabulary: _Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and log Σ e^logit. Its logits are gone when it returns."""
    logits = _logits(x, weight, temperature)
    rows, inside = vocabulary.local(labels)
    target = vocabulary.sum(logits.gather(-1, rows).squeeze(-1) * inside)
    top = vocabulary.max(logits.amax(-1))
    weights = logits.sub_(top.unsqueeze(-1)).exp()
    total = vocabulary.sum(weights.sum(-1))
    # The entropy is log Σe^z - Σ p·z with z = logits - top.
    mean = vocabulary.sum(row_dots(weights, logits)) / total
    log_total = top + total.log()
    return target - log_total, total.log() - mean, log_total


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What backward knows of a chunk's tokens; gradients are None where nobody asked."""

    x: Tensor
    labels: Tensor
    log_total: Tensor
    entropy: Tensor
    grad: Tensor | None
    grad_entropy: Tensor | None


def _grad_logits(
    chunk: _Chunk, weight: Tensor, temperature: float, vocabulary: _Vocabulary
) -> Tensor:
    """Of the logits before they are divided by the temperature."""
    logprobs = _logits(chunk.x, weight, temperature).sub_(chunk.log_total.unsqueeze(-1))
    grad_logits = torch.zeros_like(logprobs)
    if chunk.grad_entropy is not None:  # of the entropy: -p · (log p + entropy)
        surprise = (logprobs + chunk.entropy.unsqueeze(-1)).mul_(logprobs.exp())
        grad_logits.sub_(surprise.mul_(chunk.grad_entropy.unsqueeze(-1)))
        del surprise
    if chunk.grad is not None:  # of log p at the label: 1 at the label, less p
        rows, inside = vocabulary.local(chunk.labels)
        ones = inside.unsqueeze(-1).to(logprobs.dtype)
        ours = logprobs.exp_().neg_().scatter_add_(-1, rows, ones)
        grad_logits.add_(ours.mul_(chunk.grad.unsqueeze(-1)))
    return grad_logits.div_(temperature)


def _logits(x: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return torch.mm(wide(x), wide(weight).t()).div_(temperature)


def _chunks(labels: Tensor) -> list[slice]:
    return [slice(start, start + TOKEN_CHUNK) for start in range(0, len(labels), TOKEN_CHUNK)]
