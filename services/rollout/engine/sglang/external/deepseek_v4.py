"""DeepSeek-V4 inside an SGLang server that has no GPU: an external model over our reference.

SGLang's own class needs its GPU attention. Here every cache slot holds its token's id, and a
forward reads each sequence back from its slots and computes it anew; so prefix cache, retraction,
paging and every update path of the server are the real ones. It keeps the release's codes and
scales as they arrive and dequantises them once after the last of them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised
from shared.models.deepseek_v4.names import tensor_specs
from shared.models.deepseek_v4.reference import Reference
from shared.quant.activation import embedded_rounding
from shared.weights.dtypes import TORCH_DTYPES

SLOT_WIDTH = 16  # numbers of a cache slot; the first is the token id


class TandemDeepseekV4(nn.Module):
    """What SGLang asks of a model: parameters, `load_weights` and `forward`."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.arch = Architecture.from_config(config.tandem["config"])
        self.quant = embedded_rounding(
            self.arch.weight_format, activations=config.tandem["quantise_activations"]
        )
        self.canonical = {
            name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
            for name, spec in tensor_specs(self.arch).items()
        }
        for name, tensor in self.canonical.items():
            _place(self, name, tensor)
        self.reference: Reference | None = None
        self.slots = RadixAttention(1, SLOT_WIDTH, 1.0, num_kv_heads=1, layer_id=0)
        self.logits_processor = LogitsProcessor(config)
        self.identity = nn.Linear(self.arch.vocab_size, self.arch.vocab_size, bias=False)
        self.identity.weight.data = torch.eye(self.arch.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors by release name. ValueError names one of another shape or dtype."""
        for name, tensor in weights:
            kept = self.canonical.get(name)
            if kept is None:
                raise ValueError(f"{name}: the architecture has no such tensor")
            if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                expected, found = (f"{one.dtype}{list(one.shape)}" for one in (kept, tensor))
                raise ValueError(f"{name}: expected {expected}, found {found}")
            kept.copy_(tensor)
        self.reference = None

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *_: Any, **__: Any
    ) -> Any:
        if self.reference is None:
            self.reference = Reference(dequantised(self.canonical), self.arch, quant=self.quant)
        sequences = _sequences(input_ids, forward_batch)
        logits = _all_logits(self.reference, sequences)
        new = _new_tokens(forward_batch)
        rows = [one[-count:] for one, count in zip(logits, new, strict=True)]
        return self.logits_processor(input_ids, torch.cat(rows), self.identity, forward_batch)


def _sequences(input_ids: Tensor, batch: Any) -> list[Tensor]:
    """Write the new tokens into their slots, then read every sequence back from its slots."""
    pools = _pools(batch)
    slots = pools.token_to_kv_pool.get_key_buffer(0)
    slots[batch.out_cache_loc, 0, 0] = input_ids.to(slots.dtype)
    table = pools.req_to_token_pool.req_to_token
    places = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    return [slots[table[row, :length].long(), 0, 0].round().long() for row, length in places]


def _pools(batch: Any) -> Any:
    """Who holds the cache pools: the batch itself in forks of before 0.5.21, its backend since."""
    if getattr(batch, "token_to_kv_pool", None) is not None:
        return batch
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


def _new_tokens(batch: Any) -> list[int]:
    if batch.forward_mode.is_extend():
        return [int(count) for count in batch.extend_seq_lens_cpu]
    return [1] * batch.batch_size


def _all_logits(reference: Reference, sequences: list[Tensor]) -> list[Tensor]:
    """FP32 [length, V] of each sequence; rows padded on the right do not influence each other."""
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    last = reference.arch.vocab_size - 1
    logits = reference.forward(padded.clamp_(0, last)).logits
    return [logits[row, : len(one)] for row, one in enumerate(sequences)]


def _place(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` a parameter of `root` under its dotted name, so that checksums see it."""
    *path, leaf = name.split(".")
    module = root
    for part in ("weights", *path):
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    if tensor.dtype.is_floating_point:
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


EntryClass = TandemDeepseekV4
