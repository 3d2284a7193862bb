"""DeepSeek-V4 on Megatron-core primitives: the trainer's model, one pipeline stage of it.

Input is right-padded rows, one sequence per row, in slabs of one width each; tokens run flat, row
after row, between layers. Attention is causal and compressor blocks restart with each row, so
padding changes nothing. Parameter names are the release's (`weights.py` has the few exceptions).
"""

# B rows, S tokens per row, T = B·S, N streams, D model width, V vocabulary
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import embedding

from services.trainer.megatron import cpu
from services.trainer.models.deepseek_v4.block import Block, BlockInput, Recompute
from services.trainer.models.deepseek_v4.head import OutputHead, TokenScores
from services.trainer.models.deepseek_v4.hyper_connections import HeadMix
from services.trainer.models.deepseek_v4.layers import RMSNorm, freeze
from services.trainer.models.deepseek_v4.mtp import MtpBlock
from services.trainer.models.deepseek_v4.trace import Routes, Trace
from shared.models.deepseek_v4.architecture import Architecture
from shared.quant.activation import UNQUANTISED, ActivationQuant


class DeepSeekV4(MegatronModule):
    """`layers` says which of the model's layers this stage holds; token ids reach every stage."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        *,
        layers: range | None = None,
        freeze_router: bool = True,
        train_mtp: bool = False,
    ) -> None:
        super().__init__(config=config)
        layers = range(architecture.num_hidden_layers) if layers is None else layers
        self.architecture = architecture
        self.model_type = ModelType.encoder_or_decoder  # Megatron's schedules ask
        self.share_embeddings_and_output_weights = False  # and its gradient reduction
        self.pre_process = layers.start == 0
        self.post_process = layers.stop == architecture.num_hidden_layers
        self.input_tensor: Tensor | None = None
        if self.pre_process:
            self.embed = VocabParallelEmbedding(
                architecture.vocab_size,
                architecture.hidden_size,
                init_method=config.init_method,
                config=config,
            )
        blocks = {str(layer): Block(config, architecture, layer=layer) for layer in layers}
        self.layers = nn.ModuleDict(blocks)
        if self.post_process:
            self.hc_head = HeadMix(config, architecture)
            self.norm = RMSNorm(config, architecture.hidden_size)
            self.head = OutputHead(config, architecture)
            depths = range(architecture.num_nextn_predict_layers)
            self.mtp = nn.ModuleDict(
                {str(depth): MtpBlock(config, architecture, depth=depth) for depth in depths}
            )
            if not train_mtp:
                freeze(self.mtp)
        self.train_mtp = train_mtp and self.post_process
        self.shares_embedding = train_mtp and self.pre_process != self.post_process
        if self.shares_embedding and self.post_process:
            rows = architecture.vocab_size // config.tensor_model_parallel_size
            copy = torch.zeros(rows, architecture.hidden_size, dtype=config.params_dtype)
            self.register_buffer("embedding_copy", copy, persistent=False)
        routed = [*blocks.values(), *(self.mtp.values() if self.train_mtp else ())]
        for block in routed:
            block.ffn.gate.weight.requires_grad_(not freeze_router)
        self.to(cpu.device())

    def recompute(self, mode: Recompute, num_blocks: int | None) -> None:
        """Of the first `num_blocks` blocks of this stage, or of all."""
        for block in list(self.layers.values())[:num_blocks]:
            assert isinstance(block, Block)
            block.recompute = mode

    @torch.no_grad()
    def share_embedding(self) -> None:
        """Give the last stage, whose MTP blocks read it, the embedding as the first has it now.

        Collective among both, wherever MTP blocks are trained behind other stages.
        """
        if not self.shares_embedding:
            return
        group = parallel_state.get_embedding_group()
        weight = self.embed.weight.detach() if self.pre_process else self.embedding_copy
        dist.broadcast(weight, dist.get_process_group_ranks(group)[0], group=group)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """The streams that the previous pipeline stage sent, `[T, N · D]` in any shape."""
        single = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.input_tensor = single

    def forward(
        self,
        token_ids: Tensor | tuple[Tensor, ...],
        *,
        positions_N: Tensor | None = None,
        labels_N: Tensor | None = None,
        temperature: float = 1.0,
        quant: ActivationQuant = UNQUANTISED,
        routes: Routes | None = None,
        trace: Trace | None = None,
    ) -> Tensor | TokenScores:
        """Scores of `labels_N` at flat `positions_N` (row · S + token, slab after slab); without
        labels the logits, of a single slab.

        -> `TokenScores` `[N]`, or FP32 logits `[B, S, V]`; a stage that is not the last returns its
        streams `[T, N, D]`. The label of position t is the token at t + 1. `quant` says which
        activations are rounded.
        """
        given = BlockInput(token_ids, routes or Routes(), quant)
        trace = (trace or Trace()).under("", rows=len(given.slabs[0]))
        h_TND = trace.flat("embed", self._first_streams(given.flat_ids))
        for name, block in self.layers.items():
            h_TND = block(h_TND, given, trace.under(f"layers.{name}.", rows=trace.rows))
        if not self.post_process:
            return h_TND
        if labels_N is None:
            x_TD = trace.flat("norm", self.norm(trace.flat("hc_head.mix", self.hc_head(h_TND))))
            (ids_BS,) = given.slabs
            return trace("logits", self.head.logits(x_TD.view(*ids_BS.shape, -1)))
        assert positions_N is not None, "labels without positions"
        x_ND = self.norm(self.hc_head(h_TND.index_select(0, positions_N)))
        scores = self.head.score(x_ND, labels_N, temperature)
        if not (self.train_mtp and torch.is_grad_enabled()):
            return scores
        labels = _Labels(given.slabs, positions_N, labels_N)
        return replace(scores, mtp_logprobs=self._mtp_logprobs(h_TND.detach(), labels, quant))

    def mtp_logits(
        self,
        h_TND: Tensor,
        next_ids_BS: Tensor,
        *,
        depth: int = 0,
        quant: ActivationQuant = UNQUANTISED,
    ) -> Tensor:
        """FP32 logits `[B, S, V]` of the token after the next, from the last streams."""
        x_TND = self._mtp_streams(h_TND, next_ids_BS, depth, quant)
        x_TD = self._mtp_block(depth).read(x_TND)
        return self.head.logits(x_TD.view(*next_ids_BS.shape, -1))

    def _mtp_logprobs(self, h_TND: Tensor, labels: "_Labels", quant: ActivationQuant) -> Tensor:
        """`[N]` log-probabilities that MTP blocks give the labels at temperature 1, summed.

        Block k sees position i's streams and token i + 1 + k and guesses token i + 2 + k
        (DeepSeek-V3, arXiv 2412.19437, equations 21 to 24), so the first labels of a row that has
        hardly a prompt have nobody who could guess them and get 0.
        """
        next_ids, total = labels.slabs, h_TND.new_zeros(len(labels.labels))
        for depth in range(len(self.mtp)):
            # What is rolled in at a row's end stands behind all labels.
            next_ids = tuple(ids_BS.roll(-1, 1) for ids_BS in next_ids)
            h_TND = self._mtp_streams(h_TND, next_ids, depth, quant)
            (kept,) = (labels.columns > depth).nonzero(as_tuple=True)
            at = labels.positions[kept] - 1 - depth
            x_MD = self._mtp_block(depth).read(h_TND.index_select(0, at))
            scores = self.head.score(x_MD, labels.labels[kept], 1.0, learns=False)
            total = total.index_add(0, kept, scores.logprobs.to(total.dtype))
        return total

    def _mtp_streams(
        self,
        h_TND: Tensor,
        next_ids: Tensor | tuple[Tensor, ...],
        depth: int,
        quant: ActivationQuant,
    ) -> Tensor:
        given = BlockInput(next_ids, Routes(), quant)
        with torch.no_grad():
            next_TD = self._embedded(given.flat_ids)
        return self._mtp_block(depth).streams(h_TND, next_TD, given)

    def _embedded(self, ids_T: Tensor) -> Tensor:
        if self.pre_process:
            return self.embed(ids_T)
        rows = ids_T - parallel_state.get_tensor_model_parallel_rank() * len(self.embedding_copy)
        inside = (rows >= 0) & (rows < len(self.embedding_copy))
        found = embedding(rows.where(inside, 0), self.embedding_copy) * inside.unsqueeze(-1)
        return reduce_from_tensor_model_parallel_region(found)

    def _mtp_block(self, depth: int) -> MtpBlock:
        block = self.mtp[str(depth)]
        assert isinstance(block, MtpBlock)
        return block

    def _first_streams(self, ids_T: Tensor) -> Tensor:
        streams, width = self.architecture.hc_mult, self.architecture.hidden_size
        if self.pre_process:
            rows_TD = self.embed(ids_T)
            return rows_TD.unsqueeze(1).expand(-1, streams, -1).contiguous()
        assert self.input_tensor is not None, "this stage got no input"
        return self.input_tensor.view(len(ids_T), streams, width)


@dataclass(frozen=True, slots=True)
class _Labels:
    """What is scored of a batch: label n is the token after flat position n."""

    slabs: tuple[Tensor, ...]  # [B, S] each
    positions: Tensor  # [N]
    labels: Tensor  # [N]

    @property
    def columns(self) -> Tensor:
        """`[N]`: where the positions stand in their rows."""
        parts = [torch.arange(ids_BS.size(1)).repeat(len(ids_BS)) for ids_BS in self.slabs]
        return torch.cat(parts).to(self.positions.device)[self.positions]
