"""Forms compressed entries: every `ratio` tokens of a row pool into one.

Blocks restart at each row, so rows must hold one sequence each, padded on the right. The pooling
softmax is per channel, in FP32; a trailing partial block gives no entry.
"""

# B rows, S tokens, R ratio, W entries, K entry width
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from services.trainer.models.deepseek_v4 import context
from services.trainer.models.deepseek_v4.layers import ReplicatedLinear, RMSNorm, new_parameter
from services.trainer.models.deepseek_v4.rope import rotate
from shared.models.deepseek_v4.architecture import C4_RATIO


class Compressor(nn.Module):
    """Ratio 4 overlaps: entry w pools first halves of block w - 1 and second halves of block w."""

    def __init__(
        self, config: TransformerConfig, *, hidden_size: int, width: int, ratio: int
    ) -> None:
        super().__init__()
        self.ratio = ratio
        self.overlaps = ratio == C4_RATIO
        rows = 2 * width if self.overlaps else width
        self.wkv = ReplicatedLinear(config, hidden_size, rows, in_fp32=True)
        self.wgate = ReplicatedLinear(config, hidden_size, rows, in_fp32=True)
        self.ape = new_parameter(config, ratio, rows, dtype=torch.float32)
        self.norm = RMSNorm(config, width)

    def forward(self, x_BSD: Tensor, turns: Tensor) -> Tensor | None:
        """-> `[B, W, K]` in the dtype of x, rotated at each block's first token; None if W = 0."""
        num_entries = x_BSD.size(1) // self.ratio
        if num_entries == 0:
            return None
        whole = x_BSD[:, : num_entries * self.ratio]
        shape = (x_BSD.size(0), num_entries, self.ratio, -1)
        values_BWRC = self.wkv(whole).view(shape)
        gates_BWRC = self.wgate(whole).view(shape) + self.ape
        if self.overlaps:
            values_BWRC = _overlap(values_BWRC, fill=0.0)
            gates_BWRC = _overlap(gates_BWRC, fill=float("-inf"))
        pooled = (values_BWRC * gates_BWRC.softmax(2)).sum(2)
        normed = self.norm(pooled.to(x_BSD.dtype))
        return rotate(normed, turns[: num_entries * self.ratio : self.ratio])


def _overlap(blocks_BWRC: Tensor, *, fill: float) -> Tensor:
    """`[B, W, R, 2K]` -> `[B, W, 2R, K]`: the previous block's first halves, this one's second."""
    first, second = blocks_BWRC.chunk(2, -1)
    before = context.from_previous(first[:, -1:], fill=fill)
    return torch.cat((torch.cat((before, first[:, :-1]), 1), second), 2)
