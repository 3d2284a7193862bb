"""From logits to tokens, with randomness that belongs to a sample and a position alone.

A draw is a hash of (seed, prompt, sample, position), never the next number of a generator: what
else runs in the batch, and when, cannot change it. The recorded log-probability is that of the
untruncated distribution at the sampling temperature, in FP32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """One row per completion: how it is sampled, and its uniform number for this position."""

    temperature: np.ndarray  # float32 [B]
    top_p: np.ndarray  # float32 [B]
    top_k: np.ndarray  # int64 [B], 0 keeps every token
    min_p: np.ndarray  # float32 [B], 0 keeps every token
    uniform: np.ndarray  # float64 [B] in [0, 1)


def sample_key(seed: int, prompt: int, sample: int) -> int:
    """64 bits that name one completion of one request."""
    return _mix(_mix(_mix(seed & _MASK) ^ prompt) ^ sample)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1) of uint64 keys and token positions (splitmix64, 53 bits)."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@torch.inference_mode()
def sample(logits_BV: Tensor, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64 [B]) and their log-probabilities (float32 [B]) by inverse CDF in float64."""
    device = logits_BV.device
    temperature = torch.from_numpy(draws.temperature).to(device).unsqueeze(1)
    logprobs = (logits_BV.float() / temperature).log_softmax(-1)
    shares = logprobs.double().exp_()
    if (draws.top_k > 0).any() or (draws.top_p < 1).any() or (draws.min_p > 0).any():
        shares = _truncated(shares, draws)
    cdf = shares.cumsum(-1)
    total = cdf[:, -1]
    # Strictly below the total, so that the drawn token's share is never zero.
    below = total.nextafter(torch.zeros_like(total))
    target = (torch.from_numpy(draws.uniform).to(device) * total).minimum(below)
    # Logits that are not finite give some token and a log-probability that the trainer masks.
    last = logits_BV.shape[1] - 1
    tokens = torch.searchsorted(cdf, target.unsqueeze(1), right=True).clamp_(max=last)
    return tokens[:, 0].cpu().numpy(), logprobs.gather(1, tokens)[:, 0].cpu().numpy()


def token_logprobs(logits_NV: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """FP32 log-probabilities [N] of given tokens at a temperature."""
    logprobs = (logits_NV.float() / temperature).log_softmax(-1)
    return logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def _truncated(shares_BV: Tensor, draws: Draws) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; of equal shares the lower token id stays."""
    device = shares_BV.device
    ordered = shares_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(shares_BV.shape[1], device=device)
    top_k = torch.from_numpy(np.where(draws.top_k > 0, draws.top_k, shares_BV.shape[1]))
    kept = rank < top_k.to(device).unsqueeze(1)
    within = ordered.values.masked_fill(~kept, 0.0)
    before = within.cumsum(-1) - within
    top_p = torch.from_numpy(draws.top_p.astype(np.float64)).to(device).unsqueeze(1)
    kept &= before < top_p * within.sum(-1, keepdim=True)
    min_p = torch.from_numpy(draws.min_p.astype(np.float64)).to(device).unsqueeze(1)
    kept &= within >= min_p * within[:, :1]
    return torch.zeros_like(shares_BV).scatter(1, ordered.indices, within * kept)


def _mix(x: int) -> int:
    """The finaliser of splitmix64, after one step of its counter."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
