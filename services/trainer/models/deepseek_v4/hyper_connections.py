"""Hyper-connections (mHC): four residual streams, and how a sublayer reads and writes them.

    y, post, comb = mix(h)        h_k' = post_k · y + Σ_j comb_jk · h_j

Rule: coefficients are FP32 from the streams to the merge, their parameters are FP32 and never cast.
Coefficients are kept stream-major (`[24, T]`), so that small sums run over long rows.
"""

# T tokens, D model width, N streams, C = 2N + N·N coefficients
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from services.trainer.models.deepseek_v4.layers import inverse_rms, new_parameter, row_dots, wide
from shared.models.deepseek_v4.architecture import Architecture


class HyperConnection(nn.Module):
    """Reads the streams before a sublayer (`mix`) and writes its result back (`merge`)."""

    def __init__(self, config: TransformerConfig, architecture: Architecture) -> None:
        super().__init__()
        self.streams = architecture.hc_mult
        self.rounds = architecture.hc_sinkhorn_iters
        self.hc_eps = architecture.hc_eps
        self.norm_eps = architecture.rms_norm_eps
        rows = self.streams * (self.streams + 2)
        width = self.streams * architecture.hidden_size
        self.fn = new_parameter(config, rows, width, dtype=torch.float32)
        self.base = new_parameter(config, rows, dtype=torch.float32)
        self.scale = new_parameter(config, 3, dtype=torch.float32)

    def mix(self, h_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> sublayer input `[T, D]`; FP32 post `[N, T]`, comb `[N, N, T]` (first index: from)."""
        n = self.streams
        m_CT = _StreamCoefficients.apply(h_TND, self.fn, self.norm_eps)
        base = self.base.unsqueeze(-1)
        pre_NT = torch.sigmoid(torch.addcmul(base[:n], m_CT[:n], self.scale[0])) + self.hc_eps
        post_NT = 2 * torch.sigmoid(torch.addcmul(base[n : 2 * n], m_CT[n : 2 * n], self.scale[1]))
        logits = torch.addcmul(base[2 * n :], m_CT[2 * n :], self.scale[2]).view(n, n, -1)
        comb_NNT = _Sinkhorn.apply(logits, self.rounds, self.hc_eps)
        return _Collapse.apply(h_TND, pre_NT), post_NT, comb_NNT

    def merge(self, y_TD: Tensor, h_TND: Tensor, post_NT: Tensor, comb_NNT: Tensor) -> Tensor:
        return _Merge.apply(y_TD, h_TND, post_NT, comb_NNT)


class HeadMix(nn.Module):
    """Collapses the streams before the final norm: one gate per stream, no Sinkhorn."""

    def __init__(self, config: TransformerConfig, architecture: Architecture) -> None:
        super().__init__()
        self.hc_eps = architecture.hc_eps
        self.norm_eps = architecture.rms_norm_eps
        n = architecture.hc_mult
        self.fn = new_parameter(config, n, n * architecture.hidden_size, dtype=torch.float32)
        self.base = new_parameter(config, n, dtype=torch.float32)
        self.scale = new_parameter(config, 1, dtype=torch.float32)

    def forward(self, h_TND: Tensor) -> Tensor:
        m_NT = _StreamCoefficients.apply(h_TND, self.fn, self.norm_eps)
        pre_NT = torch.sigmoid(torch.addcmul(self.base.unsqueeze(-1), m_NT, self.scale))
        return _Collapse.apply(h_TND, pre_NT + self.hc_eps)


class _StreamCoefficients(torch.autograd.Function):
    """`(fn · v) · rsqrt(mean(v²) + eps)` of the flattened streams v: `[C, T]` FP32.

    Keeps the streams in their own dtype and two small tensors; nothing of size `[T, N·D]` in FP32.
    """

    @staticmethod
    def forward(ctx: Any, h_TND: Tensor, fn: Tensor, eps: float) -> Tensor:
        v = wide(h_TND).flatten(1)
        scale_T = inverse_rms(v, eps).squeeze(-1)
        m_CT = torch.mm(wide(fn), v.t()).mul_(scale_T)
        ctx.save_for_backward(h_TND, fn, scale_T, m_CT)
        return m_CT

    @staticmethod
    def backward(ctx: Any, grad_CT: Tensor) -> tuple[Tensor, Tensor, None]:
        h_TND, fn, scale_T, m_CT = ctx.saved_tensors
        v = wide(h_TND).flatten(1)
        grad_raw = grad_CT * scale_T
        # d rsqrt(mean v² + eps) / dv = -scale³ · v / size, and m already carries one scale.
        along_T = (grad_CT * m_CT).sum(0).mul_(scale_T.square()).div_(-v.size(1))
        grad_v = torch.mm(grad_raw.t(), wide(fn)).addcmul_(v, along_T.unsqueeze(1))
        return grad_v.view_as(h_TND).to(h_TND.dtype), torch.mm(grad_raw, v).to(fn.dtype), None


class _Collapse(torch.autograd.Function):
    """`Σ_j pre_j · h_j`, summed in FP32, in the streams' dtype."""

    @staticmethod
    def forward(ctx: Any, h_TND: Tensor, pre_NT: Tensor) -> Tensor:
        ctx.save_for_backward(h_TND, pre_NT)
        return _weighted_sum(pre_NT, wide(h_TND)).to(h_TND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        h_TND, pre_NT = ctx.saved_tensors
        grad = wide(grad_TD)
        grad_pre = row_dots(wide(h_TND), grad.unsqueeze(1)).t()
        grad_h = grad.unsqueeze(1) * pre_NT.t().unsqueeze(-1)
        return grad_h.to(h_TND.dtype), grad_pre


class _Merge(torch.autograd.Function):
    """`h_k' = post_k · y + Σ_j comb_jk · h_j`: the sum runs over comb's first index."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, h_TND: Tensor, post_NT: Tensor, comb_NNT: Tensor) -> Tensor:
        ctx.save_for_backward(y_TD, h_TND, post_NT, comb_NNT)
        merged = torch.bmm(comb_NNT.permute(2, 1, 0).contiguous(), wide(h_TND))
        merged.addcmul_(wide(y_TD).unsqueeze(1), post_NT.t().unsqueeze(-1))
        return merged.to(h_TND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor, ...]:
        y_TD, h_TND, post_NT, comb_NNT = ctx.saved_tensors
        grad = wide(grad_TND)
        grad_h = torch.bmm(comb_NNT.permute(2, 0, 1).contiguous(), grad)
        grad_y = _weighted_sum(post_NT, grad)
        grad_post = row_dots(grad, wide(y_TD).unsqueeze(1)).t()
        grad_comb = torch.bmm(wide(h_TND), grad.transpose(1, 2)).permute(1, 2, 0)
        return grad_y.to(y_TD.dtype), grad_h.to(h_TND.dtype), grad_post, grad_comb


def _weighted_sum(weight_NT: Tensor, h_TND: Tensor) -> Tensor:
    """`Σ_j weight_j · h_j`: a batched product needs its small matrices contiguous to be fast."""
    return torch.bmm(weight_NT.t().contiguous().unsqueeze(1), h_TND).squeeze(1)


class _Sinkhorn(torch.autograd.Function):
    """Softmax over the second index, then alternating column and row divisions.

    `rounds` column steps and `rounds - 1` row steps after the softmax. Only the logits are kept:
    backward repeats the forward steps and walks them in reverse.
    """

    @staticmethod
    def forward(ctx: Any, logits_NNT: Tensor, rounds: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits_NNT)
        ctx.rounds, ctx.eps = rounds, eps
        comb = torch.softmax(logits_NNT, dim=1).add_(eps)
        for dim in _divisions(rounds):
            comb = comb.div_(comb.sum(dim, keepdim=True).add_(eps))
        return comb

    @staticmethod
    def backward(ctx: Any, grad_NNT: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        softmax = torch.softmax(logits, dim=1)
        steps = [softmax + ctx.eps]
        for dim in _divisions(ctx.rounds):
            steps.append(steps[-1] / steps[-1].sum(dim, keepdim=True).add_(ctx.eps))
        # y = x / (Σx + eps) gives dx = (dy - Σ dy·y) / (Σx + eps), hence x·dx = y·dy - y · Σ y·dy:
        # the products with the values walk back without a division.
        product = grad_NNT.contiguous() * steps[-1]
        for dim, comb in zip(reversed(_divisions(ctx.rounds)), reversed(steps), strict=False):
            product.addcmul_(comb, product.sum(dim, keepdim=True), value=-1)
        grad = product.div_(steps[0])
        grad = softmax * (grad - (grad * softmax).sum(1, keepdim=True))
        return grad, None, None


def _divisions(rounds: int) -> list[int]:
    """The summed index of every division, in order: 0 divides columns, 1 divides rows."""
    return [0, *([1, 0] * (rounds - 1))]
