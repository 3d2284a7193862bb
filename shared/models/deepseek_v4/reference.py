"""DeepSeek-V4 in plain PyTorch: the truth that sampler and trainer are both tested against.

Read it from the top: model, block, hyper-connections, attention, compressor, indexer, experts.
Arithmetic is in the dtype of the weights (FP32, or float64 to compare quantised paths); only
`ActivationQuant` rounds anything. Prefill in any chunks and decoding are the same call: what has to
survive between two calls is in `State`, and a token's result never depends on how it was fed.

B batch rows, S new tokens, T keys, W compressed entries, D hidden, C streams, V vocabulary,
H heads, K head dim, R rotary dims (the last of K), Q query rank, G output groups,
N indexer heads, I indexer head dim, E experts, k experts per token, r compress ratio.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import weight_shapes
from shared.quant.activation import (
    UNQUANTISED,
    ActivationQuant,
    quantise_indexer,
    quantise_kv,
    quantise_linear_input,
)

Trace = Callable[[str, Tensor], None]
"""Gets (name, tensor) for each of `names.trace_points`, batch rows first."""


@dataclass(frozen=True, slots=True)
class Output:
    """Logits [B, S, V], and the streams [B, S, C, D] before the head, which MTP continues from."""

    logits: Tensor
    streams: Tensor


@dataclass(slots=True)
class CompressorState:
    """What a compressor needs to go on: the open block's rows, and the last block's first halves.

    `gate` rows carry the position bias already; `previous_*` is None before the first block.
    """

    open_kv: Tensor | None = None
    open_gate: Tensor | None = None
    previous_kv: Tensor | None = None
    previous_gate: Tensor | None = None
    entries: Tensor | None = None


@dataclass(slots=True)
class LayerState:
    """Window keys (at most window - 1 past tokens) and the two compressors of one layer."""

    window: Tensor | None = None
    main: CompressorState = field(default_factory=CompressorState)
    indexer: CompressorState = field(default_factory=CompressorState)


@dataclass(slots=True)
class State:
    """Everything a batch of equally long sequences needs to continue; it cannot be rolled back."""

    layers: list[LayerState]
    length: int = 0

    def copy(self) -> "State":
        """A snapshot: tensors are never changed in place, so they may be shared."""
        layers = [
            LayerState(layer.window, replace(layer.main), replace(layer.indexer))
            for layer in self.layers
        ]
        return State(layers, self.length)


class Reference:
    """The model over weights by release name (dequantised, one floating dtype)."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        arch: Architecture,
        *,
        quant: ActivationQuant = UNQUANTISED,
    ) -> None:
        self.weights, self.arch, self.quant = weights, arch, quant

    def new_state(self) -> State:
        """State before the first token."""
        return State([LayerState() for _ in range(self.arch.num_hidden_layers)])

    def new_mtp_state(self) -> State:
        """The same for one MTP block."""
        return State([LayerState()])

    def forward(
        self, tokens_BS: Tensor, *, state: State | None = None, trace: Trace | None = None
    ) -> Output:
        """Continue every row by S tokens (rows padded on the right never influence each other)."""
        state = state or self.new_state()
        embedded = self.weights["embed.weight"][tokens_BS]
        streams = embedded.unsqueeze(2).repeat(1, 1, self.arch.hc_mult, 1)
        root = self._part("", -1, trace)
        root.record("embed", streams)
        for layer, layer_state in enumerate(state.layers):
            part = self._part(f"layers.{layer}.", layer, trace)
            streams = block(part, streams, tokens_BS, state.length, layer_state)
        state.length += tokens_BS.shape[1]
        return Output(head(root, streams, self.weights["head.weight"]), streams)

    def mtp(
        self,
        streams_BSCD: Tensor,
        next_tokens_BS: Tensor,
        *,
        depth: int = 0,
        state: State | None = None,
        trace: Trace | None = None,
    ) -> Output:
        """Logits for the token after next: position i pairs its streams with token i + 1."""
        state = state or self.new_mtp_state()
        part = self._part(f"mtp.{depth}.", self.arch.num_hidden_layers + depth, trace)
        eps = self.arch.rms_norm_eps
        embedded = rms_norm(self.weights["embed.weight"][next_tokens_BS], part["enorm.weight"], eps)
        hidden = rms_norm(streams_BSCD, part["hnorm.weight"], eps)
        streams = part.linear(embedded, "e_proj").unsqueeze(2) + part.linear(hidden, "h_proj")
        streams = block(part, streams, next_tokens_BS, state.length, state.layers[0])
        state.length += next_tokens_BS.shape[1]
        return Output(head(part, streams, self.weights["head.weight"]), streams)

    def _part(self, prefix: str, layer: int, trace: Trace | None) -> "Part":
        return Part(self.weights, prefix, layer, self.arch, self.quant, trace)


@dataclass(frozen=True, slots=True)
class Part:
    """Weights below one prefix, with what every function of that part needs to know."""

    weights: Mapping[str, Tensor]
    prefix: str
    layer: int
    arch: Architecture
    quant: ActivationQuant
    trace: Trace | None

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def under(self, name: str) -> "Part":
        return replace(self, prefix=f"{self.prefix}{name}.")

    def record(self, name: str, tensor: Tensor) -> None:
        if self.trace is not None:
            self.trace(self.prefix + name, tensor.detach())

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A matrix that releases quantise: its input is rounded where the engine rounds it."""
        x = quantise_linear_input(x) if self.quant.linear else x
        return functional.linear(x, self[f"{name}.weight"])


def block(
    part: Part, streams_BSCD: Tensor, tokens_BS: Tensor, start: int, state: LayerState
) -> Tensor:
    """Attention, then experts, each between a mix and a merge of the streams."""
    eps = part.arch.rms_norm_eps
    mixed, post, comb = mix(part, streams_BSCD, "hc_attn")
    normed = rms_norm(mixed, part["attn_norm.weight"], eps)
    part.record("attn.norm", normed)
    attended = attention(part.under("attn"), normed, start, state)
    part.record("attn", attended)
    streams = merge(attended, streams_BSCD, post, comb)
    part.record("hc_attn.merge", streams)

    mixed, post, comb = mix(part, streams, "hc_ffn")
    normed = rms_norm(mixed, part["ffn_norm.weight"], eps)
    part.record("ffn.norm", normed)
    fed = experts(part, normed, tokens_BS)
    part.record("ffn", fed)
    streams = merge(fed, streams, post, comb)
    part.record("hc_ffn.merge", streams)
    return streams


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps), times a weight if there is one."""
    normed = x * torch.rsqrt(mean_square(x) + eps)
    return normed if weight is None else normed * weight


def mean_square(x: Tensor) -> Tensor:
    """mean(x²) over the last dim, kept; as a norm, whose gradient is a single pass over x."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]


def mix(part: Part, streams_BSCD: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
    """The sublayer's input [B, S, D], and how its output returns: post [B, S, C], comb [B, S, C, C]

    pre = σ + eps and post = 2σ of the projected, RMS-scaled streams; comb is doubly stochastic.
    """
    arch, C = part.arch, part.arch.hc_mult
    projected = _projected(streams_BSCD, part[f"{site}_fn"], arch.rms_norm_eps)
    scale, base = part[f"{site}_scale"], part[f"{site}_base"]
    pre = torch.sigmoid(projected[..., :C] * scale[0] + base[:C]) + arch.hc_eps
    post = 2 * torch.sigmoid(projected[..., C : 2 * C] * scale[1] + base[C : 2 * C])
    comb = sinkhorn(projected[..., 2 * C :] * scale[2] + base[2 * C :], arch)
    mixed = torch.einsum("bsc,bscd->bsd", pre, streams_BSCD)
    part.record(f"{site}.mix", mixed)
    part.record(f"{site}.post", post)
    part.record(f"{site}.comb", comb)
    return mixed, post, comb


def sinkhorn(logits_BSX: Tensor, arch: Architecture) -> Tensor:
    """[B, S, C, C] from C·C logits: softmax over the second index, then columns and rows in turn.

    20 column divisions and 19 row divisions (the softmax is the first), eps in each denominator.
    """
    B, S, _ = logits_BSX.shape
    C, eps = arch.hc_mult, arch.hc_eps
    # Tokens innermost: sums over four numbers are slow when those four are contiguous.
    logits_CCn = logits_BSX.reshape(B * S, C, C).permute(1, 2, 0).contiguous()
    comb = _Divided.apply(logits_CCn.softmax(1) + eps, 0, eps)
    for _ in range(arch.hc_sinkhorn_iters - 1):
        comb = _Divided.apply(comb, 1, eps)
        comb = _Divided.apply(comb, 0, eps)
    return comb.permute(2, 0, 1).reshape(B, S, C, C)


class _Divided(torch.autograd.Function):
    """x / (Σ x + eps) over one dim; autograd's own backward of it takes three times the passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, eps: float) -> Tensor:
        total = x.sum(dim, keepdim=True) + eps
        divided = x / total
        ctx.save_for_backward(divided, total)
        ctx.dim = dim
        return divided

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        divided, total = ctx.saved_tensors
        shared = (gradients[0] * divided).sum(ctx.dim, keepdim=True)
        return (gradients[0] - shared) / total, None, None


def merge(y_BSD: Tensor, streams_BSCD: Tensor, post_BSC: Tensor, comb_BSCC: Tensor) -> Tensor:
    """h'_k = post_k · y + Σ_j comb_jk · h_j: the sum runs over comb's first index."""
    # One product instead of a product and two sums: y is a fifth stream, post its weights.
    weights = torch.cat((post_BSC.unsqueeze(2), comb_BSCC), 2)
    return weights.transpose(2, 3) @ torch.cat((y_BSD.unsqueeze(2), streams_BSCD), 2)


def head(part: Part, streams_BSCD: Tensor, head_VD: Tensor) -> Tensor:
    """Logits [B, S, V] of the streams: their weighted sum, normed; no Sinkhorn here."""
    arch = part.arch
    projected = _projected(streams_BSCD, part["hc_head_fn"], arch.rms_norm_eps)
    pre = torch.sigmoid(projected * part["hc_head_scale"] + part["hc_head_base"]) + arch.hc_eps
    mixed = torch.einsum("bsc,bscd->bsd", pre, streams_BSCD)
    part.record("hc_head.mix", mixed)
    normed = rms_norm(mixed, part["norm.weight"], arch.rms_norm_eps)
    part.record("norm", normed)
    logits = functional.linear(normed, head_VD)
    part.record("logits", logits)
    return logits


def _projected(streams_BSCD: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams_BSCD.flatten(2)
    return functional.linear(flat, fn) * torch.rsqrt(mean_square(flat) + eps)


def attention(part: Part, x_BSD: Tensor, start: int, state: LayerState) -> Tensor:
    """One shared head is key and value; queries see their window and the visible entries."""
    arch = part.arch
    eps, ratio = arch.rms_norm_eps, arch.compress_ratios[part.layer]
    positions = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device)
    turns = rotations(arch, part.layer, positions, x_BSD.dtype)

    rank_BSQ = rms_norm(part.linear(x_BSD, "wq_a"), part["q_norm.weight"], eps)
    q_BSHK = part.linear(rank_BSQ, "wq_b").unflatten(-1, (arch.num_attention_heads, -1))
    q_BSHK = rotate(rms_norm(q_BSHK, None, eps), turns.unsqueeze(1))
    part.record("q", q_BSHK)
    kv_BSK = rotate(rms_norm(part.linear(x_BSD, "wkv"), part["kv_norm.weight"], eps), turns)
    kv_BSK = _rounded_kv(part, kv_BSK)
    part.record("kv", kv_BSK)

    keys_BTK, mask = window_keys(arch, kv_BSK, positions, state)
    if ratio:
        entries = compress(part.under("compressor"), x_BSD, start, state.main, _rounded_kv)
        part.record("compressor", entries)
        visible = _visible(positions, entries.shape[1], ratio)
        if arch.kind(part.layer) == "c4":
            visible = select(part.under("indexer"), x_BSD, rank_BSQ, start, visible, state.indexer)
            part.record("indexer", visible)
        keys_BTK = torch.cat((keys_BTK, entries), 1)
        mask = torch.cat((mask.expand(visible.shape[0], -1, -1), visible), -1)

    o_BSHK = attend(q_BSHK, keys_BTK, mask, part["attn_sink"])
    o_BSHK = rotate(o_BSHK, turns.conj().unsqueeze(1))
    part.record("core", o_BSHK)
    o_BSGX = o_BSHK.flatten(2).unflatten(-1, (arch.o_groups, -1))
    wo_a_GRX = part["wo_a.weight"].unflatten(0, (arch.o_groups, -1))
    return part.linear(torch.einsum("bsgx,grx->bsgr", o_BSGX, wo_a_GRX).flatten(2), "wo_b")


def rotations(arch: Architecture, layer: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """e^(i · position · frequency), complex [positions, R/2]."""
    frequencies = torch.tensor(arch.rope_frequencies(layer), dtype=dtype, device=positions.device)
    angles = positions.to(dtype).unsqueeze(1) * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the adjacent pairs (2i, 2i+1) of the last R dims; `turns` broadcasts against them."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    unturned = pairs.shape[-1] - turns.shape[-1]
    return torch.view_as_real(pairs * functional.pad(turns, (unturned, 0), value=1.0)).flatten(-2)


def window_keys(
    arch: Architecture, kv_BSK: Tensor, positions_S: Tensor, state: LayerState
) -> tuple[Tensor, Tensor]:
    """Keys of the last tokens, and which of them each query sees: itself and window - 1 before."""
    keys_BTK = kv_BSK if state.window is None else torch.cat((state.window, kv_BSK), 1)
    state.window = keys_BTK[:, max(keys_BTK.shape[1] - arch.sliding_window + 1, 0) :]
    newest = int(positions_S[-1])
    at_T = torch.arange(newest + 1 - keys_BTK.shape[1], newest + 1, device=kv_BSK.device)
    distance_ST = positions_S.unsqueeze(1) - at_T
    return keys_BTK, ((distance_ST >= 0) & (distance_ST < arch.sliding_window)).unsqueeze(0)


def attend(q_BSHK: Tensor, keys_BTK: Tensor, mask_BST: Tensor, sink_H: Tensor) -> Tensor:
    """softmax(q·k / √K) over the mask and the head's sink, which takes weight and adds nothing."""
    scores = torch.einsum("bshk,btk->bhst", q_BSHK, keys_BTK) * q_BSHK.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask_BST.unsqueeze(1), float("-inf"))
    sink = sink_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhst,btk->bshk", weights, keys_BTK)


def _visible(positions_S: Tensor, num_entries: int, ratio: int) -> Tensor:
    """[1, S, W]: the query that closes a block already sees that block's entry."""
    entry = torch.arange(num_entries, device=positions_S.device)
    return (entry < ((positions_S + 1) // ratio).unsqueeze(1)).unsqueeze(0)


def _rounded_kv(part: Part, kv: Tensor) -> Tensor:
    if not part.quant.kv:
        return kv
    nope = part.arch.nope_head_dim
    return torch.cat((quantise_kv(kv[..., :nope]), kv[..., nope:]), -1)


def compress(
    part: Part,
    x_BSD: Tensor,
    start: int,
    state: CompressorState,
    rounded: Callable[[Part, Tensor], Tensor],
) -> Tensor:
    """Pool every block that S more tokens close; returns all entries so far, [B, W, K].

    An entry is the per-channel softmax-weighted mean of its slots, normed, and turned to the
    position of its block's first token.
    """
    arch, ratio = part.arch, part.arch.compress_ratios[part.layer]
    kv, gate = _token_rows(part, x_BSD, start, state)
    first, blocks = start // ratio, kv.shape[1] // ratio
    closed = blocks * ratio
    state.open_kv, state.open_gate = kv[:, closed:], gate[:, closed:]
    if state.entries is None:
        state.entries = kv.new_zeros(kv.shape[0], 0, part["norm.weight"].shape[0])
    if not blocks:
        return state.entries
    slots_kv = kv[:, :closed].unflatten(1, (blocks, ratio))
    slots_gate = gate[:, :closed].unflatten(1, (blocks, ratio))
    if arch.kind(part.layer) == "c4":
        slots_kv, slots_gate = _overlapping(slots_kv, slots_gate, state)
    pooled = (slots_gate.softmax(2) * slots_kv).sum(2)
    pooled = rms_norm(pooled, part["norm.weight"], arch.rms_norm_eps)
    positions = ratio * torch.arange(first, first + blocks, device=x_BSD.device)
    turned = rotate(pooled, rotations(arch, part.layer, positions, x_BSD.dtype))
    state.entries = torch.cat((state.entries, rounded(part, turned)), 1)
    return state.entries


def _token_rows(
    part: Part, x_BSD: Tensor, start: int, state: CompressorState
) -> tuple[Tensor, Tensor]:
    """Values and gates (position bias added) of the open block's old rows and the new ones."""
    ape = part["ape"]
    slot = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device) % ape.shape[0]
    kv = functional.linear(x_BSD, part["wkv.weight"])
    gate = functional.linear(x_BSD, part["wgate.weight"]) + ape[slot]
    if state.open_kv is None or state.open_gate is None:
        return kv, gate
    return torch.cat((state.open_kv, kv), 1), torch.cat((state.open_gate, gate), 1)


def _overlapping(kv: Tensor, gate: Tensor, state: CompressorState) -> tuple[Tensor, Tensor]:
    """[B, blocks, 2r, K]: the first halves of the block before, then the second halves of this.

    Before the first block there is nothing: those slots get gate -inf.
    """
    first_kv, second_kv = kv.chunk(2, -1)
    first_gate, second_gate = gate.chunk(2, -1)
    before_kv, before_gate = state.previous_kv, state.previous_gate
    if before_kv is None or before_gate is None:
        before_kv = torch.zeros_like(first_kv[:, 0])
        before_gate = torch.full_like(before_kv, float("-inf"))
    state.previous_kv, state.previous_gate = first_kv[:, -1], first_gate[:, -1]
    shifted_kv = torch.cat((before_kv.unsqueeze(1), first_kv[:, :-1]), 1)
    shifted_gate = torch.cat((before_gate.unsqueeze(1), first_gate[:, :-1]), 1)
    return torch.cat((shifted_kv, second_kv), 2), torch.cat((shifted_gate, second_gate), 2)


@torch.no_grad()
def select(
    part: Part,
    x_BSD: Tensor,
    rank_BSQ: Tensor,
    start: int,
    visible_BSW: Tensor,
    state: CompressorState,
) -> Tensor:
    """Of the visible entries, the index_topk with the highest scores (no gradient passes).

    I_w = Σ_n a_n · relu(iq_n · ik_w). Equal scores keep the older entry, so that the choice does
    not depend on how many entries are looked at together.
    """
    arch = part.arch
    entries_BWI = compress(part.under("compressor"), x_BSD, start, state, _rounded_index)
    keeps_all = entries_BWI.shape[1] <= arch.index_topk
    if keeps_all and part.trace is None:
        return visible_BSW
    scores = _index_scores(part, x_BSD, rank_BSQ, start, entries_BWI)
    scores = scores.masked_fill(~visible_BSW, float("-inf"))
    part.record("scores", scores)
    if keeps_all:
        return visible_BSW
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : arch.index_topk]
    return visible_BSW & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def _index_scores(
    part: Part, x_BSD: Tensor, rank_BSQ: Tensor, start: int, entries_BWI: Tensor
) -> Tensor:
    """[B, S, W]: Σ_n a_n · relu(iq_n · ik_w) for all entries, visible or not."""
    arch = part.arch
    positions = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device)
    turns = rotations(arch, part.layer, positions, x_BSD.dtype).unsqueeze(1)
    q_BSNI = part.linear(rank_BSQ, "wq_b").unflatten(-1, (arch.index_n_heads, -1))
    q_BSNI = _rounded_index(part, rotate(q_BSNI, turns))
    scale = (arch.index_head_dim * arch.index_n_heads) ** -0.5
    a_BSN = functional.linear(x_BSD, part["weights_proj.weight"]) * scale
    products = torch.einsum("bsni,bwi->bsnw", q_BSNI, entries_BWI).relu()
    return torch.einsum("bsnw,bsn->bsw", products, a_BSN)


def _rounded_index(part: Part, x: Tensor) -> Tensor:
    return quantise_indexer(x, form=part.quant.indexer)


def experts(part: Part, x_BSD: Tensor, tokens_BS: Tensor) -> Tensor:
    """The chosen experts, weighted, plus the shared one."""
    arch, x_nD = part.arch, x_BSD.flatten(0, 1)
    weights_nk, ids_nk = route(part.under("ffn.gate"), x_nD, tokens_BS.flatten())
    dense_nE = weights_nk.new_zeros(x_nD.shape[0], arch.n_routed_experts)
    part.record("router", dense_nE.scatter(1, ids_nk, weights_nk).view(*x_BSD.shape[:2], -1))
    routed = dispatch(part, x_nD, weights_nk, ids_nk).view_as(x_BSD)
    part.record("experts", routed)
    limit = arch.swiglu_limit if arch.clamp_shared_experts else None
    shared = expert(part.under("ffn.shared_experts"), x_BSD, limit)
    part.record("shared_experts", shared)
    return routed + shared


def route(part: Part, x_nD: Tensor, tokens_n: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids of k experts a token: by the token's own row, or by score plus bias.

    The bias selects and never weighs; w = scale · s / (Σ s + 1e-20), s = sqrt(softplus(gate · x)).
    """
    arch = part.arch
    scores = functional.softplus(functional.linear(x_nD, part["weight"])).sqrt()
    if arch.is_hash_routed(part.layer):
        ids = part["tid2eid"][tokens_n].long()
    else:
        ranked = (scores + part["bias"]).sort(dim=-1, descending=True, stable=True).indices
        ids = ranked[:, : arch.num_experts_per_tok]
    chosen = scores.gather(1, ids)
    total = chosen.sum(-1, keepdim=True) + 1e-20
    return chosen / total * arch.routed_scaling_factor, ids


def dispatch(part: Part, x_nD: Tensor, weights_nk: Tensor, ids_nk: Tensor) -> Tensor:
    """Σ over a token's experts, run expert by expert on the tokens that chose it."""
    arch = part.arch
    order = ids_nk.flatten().sort(stable=True).indices
    counts = torch.bincount(ids_nk.flatten(), minlength=arch.n_routed_experts).tolist()
    token = order // arch.num_experts_per_tok
    inputs = x_nD[token].split(counts)
    factors = weights_nk.flatten()[order].unsqueeze(1).split(counts)
    outputs = [
        expert(part.under(f"ffn.experts.{e}"), inputs[e], arch.swiglu_limit, factors[e])
        for e in range(arch.n_routed_experts)
        if counts[e]
    ]
    return torch.zeros_like(x_nD).index_add(0, token, torch.cat(outputs))


def expert(part: Part, x: Tensor, limit: float | None, factor: Tensor | None = None) -> Tensor:
    """w2 · (factor · silu(min(w1 x, limit)) · clamp(w3 x, ±limit)).

    The routing weight comes before w2, whose input the quantised engines round.
    """
    gate, up = part.linear(x, "w1"), part.linear(x, "w3")
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = functional.silu(gate) * up
    return part.linear(hidden if factor is None else hidden * factor, "w2")


def initial_weights(arch: Architecture, *, generator: torch.Generator) -> dict[str, Tensor]:
    """FP32 weights to train from: streams start as copies that mostly keep to themselves."""
    return {
        name: _initial(name, shape, arch, generator) for name, shape in weight_shapes(arch).items()
    }


def _initial(
    name: str, shape: tuple[int, ...], arch: Architecture, generator: torch.Generator
) -> Tensor:
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "tid2eid":
        draws = torch.rand(shape[0], arch.n_routed_experts, generator=generator)
        return draws.argsort(-1)[:, : shape[1]].contiguous()
    if leaf.startswith("hc_") and leaf.endswith("_base"):
        return _initial_base(arch.hc_mult, shape)
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return torch.full(shape, 0.1)
    if leaf.endswith("norm"):
        return torch.ones(shape)
    if leaf in ("ape", "attn_sink", "bias"):
        return torch.zeros(shape)
    return torch.randn(shape, generator=generator) * arch.initializer_range


def _initial_base(C: int, shape: tuple[int, ...]) -> Tensor:
    """pre = 1/C each, post = 1, comb near the identity."""
    pre = torch.full((C,), -math.log(C - 1))
    if shape == (C,):
        return pre
    return torch.cat((pre, torch.zeros(C), 4 * torch.eye(C).flatten()))
