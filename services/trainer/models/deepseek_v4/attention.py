"""Hybrid attention of one layer: window attention with K = V, plus compressed entries.

Heads and output groups are sharded over tensor-parallel ranks; the latent projections, the norms,
the compressor and the indexer are whole on every rank. Context-parallel ranks hold consecutive
tokens of every row and gather keys and entries.
"""

# B rows, S tokens, D model width, H local heads, K head width, G local output groups
from dataclasses import replace

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from services.trainer.models.deepseek_v4 import activations, context
from services.trainer.models.deepseek_v4.attention_core import Reach, attend, visible
from services.trainer.models.deepseek_v4.compressor import Compressor
from services.trainer.models.deepseek_v4.indexer import Indexer
from services.trainer.models.deepseek_v4.layers import (
    ColumnLinear,
    GroupedColumnLinear,
    ReplicatedLinear,
    RMSNorm,
    RowLinear,
    split_parameter,
    wide,
)
from services.trainer.models.deepseek_v4.rope import norm_rotate, rotate
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import ActivationQuant


class HybridAttention(nn.Module):
    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, layer: int
    ) -> None:
        super().__init__()
        a = architecture
        self.layer = layer
        self.head_dim, self.eps = a.head_dim, a.rms_norm_eps
        self.reach = Reach(window=a.sliding_window, ratio=a.compress_ratios[layer])
        tensor_parallel = config.tensor_model_parallel_size
        self.heads = a.num_attention_heads // tensor_parallel
        self.groups = a.o_groups // tensor_parallel
        width = a.num_attention_heads * a.head_dim

        self.wq_a = ReplicatedLinear(config, a.hidden_size, a.q_lora_rank)
        self.q_norm = RMSNorm(config, a.q_lora_rank)
        self.wq_b = ColumnLinear(config, a.q_lora_rank, width)
        self.wkv = ReplicatedLinear(config, a.hidden_size, a.head_dim)
        self.kv_norm = RMSNorm(config, a.head_dim)
        self.attn_sink = split_parameter(torch.zeros(self.heads, dtype=torch.float32))
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if self.reach.ratio:
            self.compressor = Compressor(
                config, hidden_size=a.hidden_size, width=a.head_dim, ratio=self.reach.ratio
            )
        if a.kind(layer) == "c4":
            self.indexer = Indexer(config, a, ratio=self.reach.ratio)
        self.wo_a = GroupedColumnLinear(
            config, groups=a.o_groups, group_width=width // a.o_groups, rank=a.o_lora_rank
        )
        self.wo_b = RowLinear(config, a.o_groups * a.o_lora_rank, a.hidden_size)

    def forward(
        self,
        x_BSD: Tensor,
        turns: Tensor,
        routes: Routes,
        trace: Trace,
        quant: ActivationQuant,
    ) -> Tensor:
        """`[B, S, D]` -> `[B * S, D]`."""
        rows, length, _ = x_BSD.shape
        reach = replace(self.reach, first=context.first(length))
        rounded_BSD = activations.linear_input(x_BSD, quant)
        turns_S1P = turns.unsqueeze(1)
        qr = activations.linear_input(self.q_norm(self.wq_a(rounded_BSD)), quant)
        q_BSHK = self.wq_b(qr).view(rows, length, self.heads, self.head_dim)
        q_BSHK = trace("attn.q", norm_rotate(q_BSHK, turns_S1P, self.eps))
        kv_BSK = rotate(self.kv_norm(self.wkv(rounded_BSD)), turns)
        kv_BSK = trace("attn.kv", activations.keys(kv_BSK, quant, rotary=2 * turns.size(-1)))
        entries_BWK, selected_BSW = self._entries(x_BSD, qr, turns, routes, trace, quant)
        out_BSHK = attend(
            q_BSHK,
            context.gather(_for_all_heads(kv_BSK)),
            self.attn_sink,
            None if entries_BWK is None else context.gather(_for_all_heads(entries_BWK)),
            selected_BSW,
            reach=reach,
        )
        out_BSHK = trace("attn.core", rotate(out_BSHK, turns_S1P, inverse=True))
        up_TR = self.wo_a(out_BSHK.view(rows * length, self.groups, -1))
        return self.wo_b(activations.linear_input(up_TR, quant))

    def _entries(
        self,
        x_BSD: Tensor,
        qr: Tensor,
        turns: Tensor,
        routes: Routes,
        trace: Trace,
        quant: ActivationQuant,
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.compressor is None:
            return None, None
        entries = self.compressor(x_BSD, turns)
        if entries is not None:
            entries = activations.keys(entries, quant, rotary=2 * turns.size(-1))
            trace("attn.compressor", entries)
        else:
            trace("attn.compressor", x_BSD.new_empty(len(x_BSD), 0, self.head_dim))
        if self.indexer is None:
            return entries, None
        selected = routes.entries.get(self.layer)
        if selected is None:
            selected = self.indexer(x_BSD, qr, turns, quant.indexer, trace)
        self._trace_selected(selected, x_BSD, trace)
        return entries, selected

    def _trace_selected(self, selected: Tensor | None, x_BSD: Tensor, trace: Trace) -> None:
        """The entries that each query may use; without a selection those that are visible."""
        if trace.states is None:
            return
        rows, length, _ = x_BSD.shape
        if selected is None:
            shape = (rows, length, context.size() * length // self.reach.ratio)
            selected = torch.ones(shape, dtype=torch.bool, device=x_BSD.device)
        reach = replace(self.reach, first=context.first(length))
        trace("attn.indexer", selected & visible(selected, reach))


def _for_all_heads(shared: Tensor) -> Tensor:
    """K = V feeds every rank's heads: its gradient is summed over tensor-parallel ranks in FP32."""
    return copy_to_tensor_model_parallel_region(wide(shared))
