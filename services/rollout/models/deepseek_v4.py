"""DeepSeek-V4 as a sampler runs it: many sequences at once, a few tokens of each, state in slots.

One function per sub-module, in order of computation; formulas are those of the release's inference
code. Weights come derived (deepseek_v4_weights.py), indices come planned (deepseek_v4_cache.py), so
nothing here loops over rows or tokens. A row's result does not depend on the other rows, bit for
bit, as long as every count is a multiple of ROWS.
"""

# N tokens (R·C when padded), R sequences, C tokens of each, D model dim, S streams
# H heads, K head dim, P rope pairs, T keys, G output groups
# E entries, I index dim, J index heads; in the MoE: X experts, F inner dim, k experts per token

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.models.deepseek_v4_cache import (
    ROWS,
    Cache,
    Compression,
    CompressorCache,
    Emission,
    LayerCache,
    Route,
    Step,
)
from services.rollout.models.deepseek_v4_weights import Block, Compressor, Derived, Mix
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import ActivationQuant
from shared.quant.fast_activation import round_indexer, round_kv, round_linear_input

Trace = Callable[[str, Tensor], None]

# What is padded here goes to a multiple of ROWS, or of half of it where rows are short: of longer
# ones some processors add up eight otherwise than sixteen (Xeons with AMX, from 192 numbers on).
_SHORT_ROW = 128


@dataclass(slots=True)
class Choices:
    """What a step chose at each of its N tokens, layer after layer."""

    experts: list[Tensor] = field(default_factory=list)  # [N, k] of every layer
    entries: list[Tensor] = field(default_factory=list)  # bool [N, entries], of indexers that chose


@dataclass(frozen=True, slots=True)
class Sampler:
    """The model of one engine. Weights are passed in, since they change between steps."""

    arch: Architecture
    quant: ActivationQuant
    trace: Trace | None = None

    @torch.inference_mode()
    def hidden(
        self, weights: Derived, cache: Cache, step: Step, *, choices: Choices | None = None
    ) -> Tensor:
        """Normed hidden states [N, D] of the step's tokens, their state appended to the cache.

        `choices` takes what routers and indexers choose meanwhile.
        """
        h_NSD = self.first_streams(weights, step)
        for layer, block in enumerate(weights.blocks):
            h_NSD = self.block(layer, block, cache.layers[layer], step, h_NSD, choices)
        return self.last_hidden(weights, h_NSD)

    def first_streams(self, weights: Derived, step: Step) -> Tensor:
        """Every stream starts as the token's embedding, [N, S, D]."""
        embedded = weights.embed.index_select(0, step.token_ids)
        h_NSD = embedded.unsqueeze(1).repeat(1, self.arch.hc_mult, 1)
        self._note("embed", h_NSD)
        return h_NSD

    def last_hidden(self, weights: Derived, h_NSD: Tensor) -> Tensor:
        """What the head reads: the streams' weighted sum, normed [N, D]; no Sinkhorn here."""
        gates_SN = _mixing(h_NSD, weights.head_mix, self.arch).sigmoid_()
        y_ND = _weighted(gates_SN.add_(_constant(self.arch.hc_eps, h_NSD)), h_NSD)
        self._note("hc_head.mix", y_ND)
        x_ND = _rms(y_ND, weights.norm, self.arch.rms_norm_eps)
        self._note("norm", x_ND)
        return x_ND

    @torch.inference_mode()
    def logits(self, weights: Derived, x_ND: Tensor) -> Tensor:
        """FP32 (or float64) logits [N, V]; rows are padded for the product."""
        missing = -x_ND.shape[0] % _multiple(x_ND.shape[1])
        padded = functional.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND
        logits = functional.linear(padded, weights.head)[: x_ND.shape[0]]
        self._note("logits", logits)
        return logits

    def block(
        self,
        layer: int,
        block: Block,
        cache: LayerCache,
        step: Step,
        h_NSD: Tensor,
        choices: Choices | None = None,
    ) -> Tensor:
        """Streams in, streams out: attention, then experts, each between a mix and a merge."""
        eps = self.arch.rms_norm_eps
        y_ND, post_SN, comb = _mix(h_NSD, block.attn_mix, self.arch)
        self._note_mix(layer, "hc_attn", y_ND, post_SN, comb)
        x_ND = _rms(y_ND, block.attn_norm, eps)
        self._note_in(layer, "attn.norm", x_ND)
        y_ND = self._attention(layer, block, cache, step, choices, x_ND)
        self._note_in(layer, "attn", y_ND)
        h_NSD = _merge(y_ND, h_NSD, post_SN, comb)
        self._note_in(layer, "hc_attn.merge", h_NSD)
        y_ND, post_SN, comb = _mix(h_NSD, block.ffn_mix, self.arch)
        self._note_mix(layer, "hc_ffn", y_ND, post_SN, comb)
        x_ND = _rms(y_ND, block.ffn_norm, eps)
        self._note_in(layer, "ffn.norm", x_ND)
        y_ND = self._experts(layer, block, step.token_ids, choices, x_ND)
        self._note_in(layer, "ffn", y_ND)
        h_NSD = _merge(y_ND, h_NSD, post_SN, comb)
        self._note_in(layer, "hc_ffn.merge", h_NSD)
        return h_NSD

    # ---------------------------------------------------------------- attention

    def _attention(
        self,
        layer: int,
        block: Block,
        cache: LayerCache,
        step: Step,
        choices: Choices | None,
        x_ND: Tensor,
    ) -> Tensor:
        arch, route = self.arch, step.routes[self.arch.compress_ratios[layer]]
        heads, size = arch.num_attention_heads, arch.head_dim
        turns, turns_back = (
            step.compressed_turns if arch.compress_ratios[layer] else step.plain_turns
        )
        down = functional.linear(self._linear_input(x_ND), block.qkv_down)
        qr = _rms(down[:, : arch.q_lora_rank], block.q_norm, arch.rms_norm_eps)
        up = functional.linear(self._linear_input(qr), block.q_up)
        q_NHK = _rms(up[:, : heads * size].view(-1, heads, size), None, arch.rms_norm_eps)
        _rotate(q_NHK, turns)
        kv_NK = _rms(down[:, arch.q_lora_rank :], block.kv_norm, arch.rms_norm_eps)
        _rotate(kv_NK.unsqueeze(1), turns)
        self._round_key(kv_NK)
        self._note_in(layer, "attn.q", q_NHK)
        self._note_in(layer, "attn.kv", kv_NK)
        bias = route.bias
        if block.compressor and cache.compressor and route.compression:
            inner = cache.compressor
            inputs = functional.linear(x_ND, block.compressor.inputs)
            self._compress(layer, block.compressor, cache.keys, inner, route.compression, inputs)
            if inner.index_keys is not None:
                index_q = up[:, heads * size :].view(-1, arch.index_n_heads, arch.index_head_dim)
                index_w = inputs[:, inner.ring.shape[-1] :]
                index_keys = inner.index_keys
                index = (index_q, index_w, index_keys)
                bias = self._select(layer, index, turns, step, route, choices)
                self._note_selected(layer, bias, route)
        keys_RTK = _visible_keys(cache, step, route, kv_NK)
        o_NHK = _attend(q_NHK, keys_RTK, bias, block.sink, step)
        _rotate(o_NHK, turns_back)
        self._note_in(layer, "attn.core", o_NHK)
        grouped = o_NHK.view(-1, arch.o_groups, heads * size // arch.o_groups).transpose(0, 1)
        u_ND = torch.bmm(grouped, block.out_groups).transpose(0, 1).flatten(1)
        return functional.linear(self._linear_input(u_ND), block.out)

    def _compress(
        self,
        layer: int,
        compressor: Compressor,
        keys: Tensor,
        cache: CompressorCache,
        plan: Compression,
        inputs: Tensor,
    ) -> None:
        """Append rows to the open blocks and write the entries of those that close."""
        columns = cache.ring.shape[-1]
        rows = inputs[:, :columns] + compressor.ape.index_select(0, plan.phase)
        flat_ring, emission = cache.ring.view(-1, columns), plan.emission
        if plan.ring_from is None:  # decoding: the ring holds the whole block once written
            flat_ring.index_copy_(0, plan.ring_to, rows)
        entries = None
        if emission is not None:
            entries = self._pool(compressor, emission, flat_ring, rows)
        if plan.ring_from is not None:
            flat_ring.index_copy_(0, plan.ring_to, rows.index_select(0, plan.ring_from))
        if emission is not None and entries is not None:
            main = self._store(compressor, keys, cache, emission, entries)
            self._note_in(layer, "attn.compressor", main)
        else:
            self._note_in(layer, "attn.compressor", keys[0, :0])

    def _pool(
        self, compressor: Compressor, emission: Emission, flat_ring: Tensor, rows: Tensor
    ) -> Tensor:
        """Per channel, softmax over the block's slots of the gates, applied to the keys."""
        halves = 1 if compressor.index_norm is None else 2
        half_columns = flat_ring.shape[-1] // halves
        picked = flat_ring.view(-1, half_columns).index_select(0, emission.from_ring)
        if emission.fresh is not None:
            from_new, is_new = emission.fresh
            fresh = rows.view(-1, half_columns).index_select(0, from_new)
            picked = torch.where(is_new[:, None], fresh, picked)
        picked = picked.view(emission.key_rows.shape[0], -1, 2, half_columns // 2)
        keys, gates = picked[:, :, 0], picked[:, :, 1]
        if emission.has_no_past is not None:
            past = gates[:, : gates.shape[1] // 2]
            past.masked_fill_(emission.has_no_past[:, None, None], -torch.inf)
        return (gates.softmax(1) * keys).sum(1)

    def _store(
        self,
        compressor: Compressor,
        keys: Tensor,
        cache: CompressorCache,
        emission: Emission,
        entries: Tensor,
    ) -> Tensor:
        """Write entries, main and indexer's, to the cache; -> the main ones [E, K]."""
        size, eps = self.arch.head_dim, self.arch.rms_norm_eps
        main = _rms(entries[:, :size], compressor.norm, eps)
        _rotate(main, emission.turns)
        self._round_key(main)
        keys.view(-1, size).index_copy_(0, emission.key_rows, main)
        if cache.index_keys is not None and emission.index_rows is not None:
            index = _rms(entries[:, size:], compressor.index_norm, eps)
            _rotate(index, emission.turns)
            index = round_indexer(index, form=self.quant.indexer)
            cache.index_keys.view(-1, index.shape[-1]).index_copy_(0, emission.index_rows, index)
        return main

    def _select(
        self,
        layer: int,
        index: tuple[Tensor, Tensor, Tensor],
        turns: Tensor,
        step: Step,
        route: Route,
        choices: Choices | None,
    ) -> Tensor:
        """The bias [R, C, T] in which only each query's best entries stay visible.

        `index` is the indexer's own: queries [N, J, I], weights of its heads [N, J], keys.
        """
        num, plan, topk = route.num_entries, route.compression, self.arch.index_topk
        if plan is None or (num <= topk and self.trace is None):
            return route.bias
        scores_RCE = self._index_scores(*index, turns, step, num).add_(plan.entry_bias)
        self._note_in(layer, "attn.indexer.scores", scores_RCE)
        if num <= topk:
            return route.bias
        best = _stable_top(scores_RCE, topk)
        # A pick that is not visible (fewer entries than picks) stays invisible.
        chosen = torch.full_like(scores_RCE, -torch.inf).scatter_(2, best, 0.0)
        chosen.add_(plan.entry_bias)
        if choices is not None:
            choices.entries.append(_flat(chosen == 0, step))
        first = route.num_keys - num
        return torch.cat(
            (route.bias[..., :first], chosen, route.bias[..., route.num_keys :]), dim=-1
        )

    def _index_scores(
        self,
        q_NJI: Tensor,
        weights_NJ: Tensor,
        index_keys: Tensor,
        turns: Tensor,
        step: Step,
        num: int,
    ) -> Tensor:
        """[R, C, num]: Σ_j a_j · relu(iq_j · ik_e) for all entries, visible or not."""
        arch = self.arch
        q_NJI = q_NJI.contiguous()
        _rotate(q_NJI, turns)
        q_NJI = round_indexer(q_NJI, form=self.quant.indexer)
        scale = arch.index_head_dim**-0.5 * arch.index_n_heads**-0.5
        q_RcI = _padded(q_NJI.flatten(1), step).view(len(step.slots), -1, arch.index_head_dim)
        products = torch.bmm(q_RcI, _of_slots(index_keys, step, num).transpose(1, 2)).relu_()
        products = products.view(len(step.slots), step.width, arch.index_n_heads, num)
        weights = _padded(weights_NJ, step).view(*products.shape[:3], 1)
        return (products * weights).sum(2).mul_(scale)

    # ---------------------------------------------------------------- experts

    def _experts(
        self, layer: int, block: Block, token_ids: Tensor, choices: Choices | None, x_ND: Tensor
    ) -> Tensor:
        """Routed experts and, as one more that every token visits, the shared expert."""
        arch = self.arch
        weights_Nk, experts_Nk = self._route(block, token_ids, x_ND)
        self._note_router(layer, weights_Nk, experts_Nk)
        if choices is not None:
            choices.experts.append(experts_Nk)
        multiple = _multiple(max(arch.hidden_size, arch.moe_intermediate_size))
        plan = _Dispatch.of(experts_Nk, arch.n_routed_experts, multiple)
        num, routed = x_ND.shape[0], plan.num_rows
        x_ND = self._linear_input(x_ND)
        rows = torch.cat((x_ND.index_select(0, plan.token_of), x_ND))
        inner = _by_expert(rows, block.experts_in, plan)
        hidden = self._swiglu(inner, routed)
        # The release weighs before the second matrix's input is rounded.
        hidden[:routed].mul_(weights_Nk.view(-1).index_select(0, plan.pair_of).unsqueeze(-1))
        out = _by_expert(self._linear_input(hidden), block.experts_out, plan)
        routed_ND = out.index_select(0, plan.row_of).view(num, -1, out.shape[-1]).sum(1)
        self._note_in(layer, "experts", routed_ND)
        self._note_in(layer, "shared_experts", out[routed:])
        return routed_ND.add_(out[routed:])

    def _route(self, block: Block, token_ids: Tensor, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        arch = self.arch
        scores_NX = functional.softplus(functional.linear(x_ND, block.gate)).sqrt_()
        if block.token_experts is not None:
            experts_Nk = block.token_experts.index_select(0, token_ids)
        else:
            assert block.gate_bias is not None
            biased = scores_NX + block.gate_bias  # the bias selects, it never weighs
            experts_Nk = _stable_top(biased, arch.num_experts_per_tok)
        chosen_Nk = scores_NX.gather(1, experts_Nk)
        total = chosen_Nk.sum(-1, keepdim=True).add_(_constant(1e-20, x_ND))
        scale = _constant(arch.routed_scaling_factor, x_ND)
        return chosen_Nk.div_(total).mul_(scale), experts_Nk

    def _swiglu(self, inner: Tensor, routed: int) -> Tensor:
        """silu(gate) · up; gates are clamped from above only, both before the activation."""
        limit, size = self.arch.swiglu_limit, inner.shape[-1] // 2
        bounded = inner if self.arch.clamp_shared_experts else inner[:routed]
        bounded[:, :size].clamp_(max=limit)
        bounded[:, size:].clamp_(-limit, limit)
        return functional.silu(inner[:, :size]).mul_(inner[:, size:])

    # ---------------------------------------------------------------- rounding and tracing

    def _linear_input(self, x: Tensor) -> Tensor:
        return round_linear_input(x) if self.quant.linear else x

    def _round_key(self, keys: Tensor) -> None:
        """In place, the positionless dims alone."""
        if self.quant.kv:
            nope = keys[:, : self.arch.nope_head_dim]
            nope.copy_(round_kv(nope))

    def _note(self, name: str, value: Tensor) -> None:
        """Whoever traces copies at once: values are changed in place later."""
        if self.trace is not None:
            self.trace(name, value)

    def _note_in(self, layer: int, name: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace(f"layers.{layer}.{name}", value)

    def _note_mix(self, layer: int, site: str, y_ND: Tensor, post_SN: Tensor, comb: Tensor) -> None:
        if self.trace is not None:
            streams = post_SN.shape[0]
            self._note_in(layer, f"{site}.mix", y_ND)
            self._note_in(layer, f"{site}.post", post_SN.t())
            comb_NSS = comb.view(streams, streams, -1).permute(2, 0, 1)
            self._note_in(layer, f"{site}.comb", comb_NSS)

    def _note_selected(self, layer: int, bias: Tensor, route: Route) -> None:
        """Which entries every query may use, bool [R, C, num_entries]."""
        if self.trace is not None:
            first = route.num_keys - route.num_entries
            self._note_in(layer, "attn.indexer", bias[..., first : route.num_keys] == 0)

    def _note_router(self, layer: int, weights_Nk: Tensor, experts_Nk: Tensor) -> None:
        """Weights by expert [N, X], zero where not chosen."""
        if self.trace is not None:
            dense = weights_Nk.new_zeros(len(weights_Nk), self.arch.n_routed_experts)
            self._note_in(layer, "router", dense.scatter(1, experts_Nk, weights_Nk))


# -------------------------------------------------------------------- hyper-connections


def _mixing(h_NSD: Tensor, mix: Mix, arch: Architecture) -> Tensor:
    """[M, N]: fn · v · rsqrt(mean(v²) + eps) for v = flatten(h), then scaled and shifted."""
    v = h_NSD.flatten(1)
    # Tokens are the rows: as columns of a product so long they get other bits among many others.
    m_MN = torch.mm(v, mix.fn.t()).t().contiguous()
    m_MN.mul_(_rms_scale(v, arch.rms_norm_eps).squeeze(1))
    return torch.addcmul(mix.base, m_MN, mix.scale)


def _mix(h_NSD: Tensor, mix: Mix, arch: Architecture) -> tuple[Tensor, Tensor, Tensor]:
    """Layer input [N, D], post [S, N] and the doubly normalised C [S·S, N] (rows j, columns k)."""
    streams = arch.hc_mult
    m_MN, eps = _mixing(h_NSD, mix, arch), _constant(arch.hc_eps, h_NSD)
    gates = m_MN[: 2 * streams].sigmoid_()
    y_ND = _weighted(gates[:streams].add_(eps), h_NSD)
    post_SN = gates[streams:].mul_(_constant(2.0, h_NSD))
    comb = m_MN[2 * streams :].view(streams, streams, -1).softmax(1).view(streams**2, -1)
    return y_ND, post_SN, _sinkhorn(comb.add_(eps), arch)


def _sinkhorn(comb: Tensor, arch: Architecture) -> Tensor:
    """Columns, then rows and columns in turn; a product with 0/1 sums, adds eps and spreads.

    The last row of `held` is eps for every token, so that no division needs an addition of its own.
    """
    size = comb.shape[0]
    rows, columns = _sum_matrices(arch.hc_mult, comb.dtype, comb.device)
    held = comb.new_full((size + 1, comb.shape[1]), arch.hc_eps)
    shares = held[:size].copy_(comb)
    sums = torch.empty_like(comb)
    shares.div_(torch.mm(columns, held, out=sums))
    for _ in range(arch.hc_sinkhorn_iters - 1):
        shares.div_(torch.mm(rows, held, out=sums))
        shares.div_(torch.mm(columns, held, out=sums))
    return shares


@lru_cache(maxsize=8)
def _sum_matrices(streams: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """[S·S, S·S + 1] of 0 and 1: an element becomes the sum of its row, or column, plus eps."""
    eye = torch.eye(streams, dtype=dtype, device=device)
    ones, eps = torch.ones_like(eye), torch.ones(streams**2, 1, dtype=dtype, device=device)
    rows, columns = torch.kron(eye, ones), torch.kron(ones, eye)
    return torch.cat((rows, eps), dim=1), torch.cat((columns, eps), dim=1)


def _weighted(pre_SN: Tensor, h_NSD: Tensor) -> Tensor:
    return torch.bmm(pre_SN.t().contiguous().unsqueeze(1), h_NSD).squeeze(1)


def _merge(y_ND: Tensor, h_NSD: Tensor, post_SN: Tensor, comb: Tensor) -> Tensor:
    """h'_k = post_k · y + Σ_j C_jk · h_j: the sum runs over C's first index."""
    streams = h_NSD.shape[1]
    transposed = comb.view(streams, streams, -1).permute(2, 1, 0).contiguous()
    return torch.baddbmm(post_SN.t().unsqueeze(-1) * y_ND.unsqueeze(1), transposed, h_NSD)


# -------------------------------------------------------------------- attention's parts


def _visible_keys(cache: LayerCache, step: Step, route: Route, kv_NK: Tensor) -> Tensor:
    """Keys [R, T, K] of each sequence: sink row, window, entries, and when prefilling its own."""
    flat = cache.keys.view(-1, kv_NK.shape[-1])
    if step.is_decode:
        flat.index_copy_(0, route.write_to, kv_NK)
        return _of_slots(cache.keys, step, route.num_keys)
    held = _of_slots(cache.keys, step, route.num_keys)
    own = _padded(kv_NK, step).view(len(step.slots), step.width, -1)
    assert route.write_from is not None
    flat.index_copy_(0, route.write_to, kv_NK.index_select(0, route.write_from))
    return torch.cat((held, own), dim=1)


def _of_slots(state: Tensor, step: Step, num: int) -> Tensor:
    """The first `num` rows that each sequence's slot holds, [R, num, ...]."""
    return state[:, :num].index_select(0, step.slots)


def _attend(
    q_NHK: Tensor, keys_RTK: Tensor, bias_RCT: Tensor, sink_H: Tensor, step: Step
) -> Tensor:
    """Softmax over the visible keys and the sink, which has a logit per head and no value."""
    num, heads, size = q_NHK.shape
    q = _padded(q_NHK.reshape(num, -1), step).view(len(step.slots), -1, size)
    products = torch.bmm(q, keys_RTK.transpose(1, 2))
    products = products.view(len(step.slots), step.width, heads, -1)
    logits = torch.add(bias_RCT.unsqueeze(2), products, alpha=size**-0.5)
    logits[..., 0] = sink_H
    shares = logits.softmax(-1).view(len(step.slots), -1, logits.shape[-1])
    o = torch.bmm(shares, keys_RTK).view(-1, heads, size)
    return o if step.from_padded is None else o.index_select(0, step.from_padded)


def _padded(x_Nw: Tensor, step: Step) -> Tensor:
    """[R · C, w]: what is beyond a sequence's last token is never looked at."""
    return x_Nw if step.to_padded is None else x_Nw.index_select(0, step.to_padded)


def _flat(x_RCw: Tensor, step: Step) -> Tensor:
    """[N, w] of the step's tokens; the inverse of `_padded`."""
    flat = x_RCw.flatten(0, 1)
    return flat if step.from_padded is None else flat.index_select(0, step.from_padded)


def _rotate(x: Tensor, turns: Tensor) -> None:
    """RoPE in place: adjacent pairs of the trailing dims of x [..., K] turn together."""
    pairs = turns.shape[-1]
    tail = x[..., -2 * pairs :].unflatten(-1, (pairs, 2))
    torch.view_as_complex(tail).mul_(turns)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x * _rms_scale(x, eps)
    return normed if weight is None else normed.mul_(weight)


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x²) + eps) over the last dim, [..., 1]."""
    total = (x * x).sum(-1, keepdim=True)
    return total.mul_(_constant(1 / x.shape[-1], x)).add_(_constant(eps, x)).rsqrt_()


def _constant(value: float, like: Tensor) -> Tensor:
    """A number as a tensor: on small operands a Python number costs more than the operation."""
    return _constants(value, like.dtype, like.device)


@lru_cache(maxsize=64)
def _constants(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _multiple(width: int) -> int:
    """Of rows so wide: what their number is rounded up to."""
    return ROWS // 2 if width <= _SHORT_ROW else ROWS


def _stable_top(scores: Tensor, num: int) -> Tensor:
    """Indices of the largest; of equals the first. `topk` breaks ties by shape."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    return order.indices[..., :num]


# -------------------------------------------------------------------- experts' parts


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """Rows sorted by expert, each expert's count rounded up; rows beyond a count are unused."""

    token_of: Tensor  # [rows] token that a row carries
    pair_of: Tensor  # [rows] index into the flat [N, k] weights
    row_of: Tensor  # [N·k] row of each (token, choice)
    experts: list[int]  # those that any token chose
    sizes: list[int]  # their rows
    num_rows: int

    @classmethod
    def of(cls, experts_Nk: Tensor, num_experts: int, multiple: int) -> "_Dispatch":
        flat = experts_Nk.cpu().numpy().ravel()
        order = flat.argsort(kind="stable")
        counts = np.bincount(flat, minlength=num_experts)
        sizes = (counts + multiple - 1) // multiple * multiple
        unused = (sizes - counts).cumsum() - (sizes - counts)
        rows = np.arange(len(flat)) + unused.repeat(counts)
        pair_of = np.zeros(sizes.sum(), np.int64)
        pair_of[rows] = order
        row_of = np.empty_like(order)
        row_of[order] = rows
        used = counts.nonzero()[0]
        pairs = torch.from_numpy(pair_of).to(experts_Nk.device)
        return cls(
            token_of=pairs // experts_Nk.shape[1],
            pair_of=pairs,
            row_of=torch.from_numpy(row_of).to(experts_Nk.device),
            experts=used.tolist(),
            sizes=sizes[used].tolist(),
            num_rows=len(pair_of),
        )


def _by_expert(rows: Tensor, matrices: Tensor, plan: _Dispatch) -> Tensor:
    """Each expert's rows through its matrix; rows after the routed ones go to the last, shared."""
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    sizes = [*plan.sizes, rows.shape[0] - plan.num_rows]
    by_column = matrices.transpose(1, 2).unbind()
    parts = zip((*plan.experts, -1), rows.split(sizes), out.split(sizes), strict=True)
    for expert, inputs, outputs in parts:
        torch.mm(inputs, by_column[expert], out=outputs)
    return out
