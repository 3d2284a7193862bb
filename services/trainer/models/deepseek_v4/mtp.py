"""Multi-token prediction: one more block that guesses the token after the next one.

Its weights travel with the policy. They are frozen unless a job trains them, by a loss that reaches
nothing else: the streams, the embedding and the output head that the block reads are detached.
"""

# T tokens, N streams, D model width
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.models.deepseek_v4.activations import linear_input
from services.trainer.models.deepseek_v4.block import Block, BlockInput
from services.trainer.models.deepseek_v4.hyper_connections import HeadMix
from services.trainer.models.deepseek_v4.layers import ReplicatedLinear, RMSNorm
from services.trainer.models.deepseek_v4.trace import Trace
from shared.models.deepseek_v4.architecture import Architecture


class MtpBlock(Block):
    """`depth` 0 is the first; it counts as layer `num_hidden_layers + depth`."""

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, depth: int
    ) -> None:
        super().__init__(config, architecture, layer=architecture.num_hidden_layers + depth)
        width = architecture.hidden_size
        self.enorm = RMSNorm(config, width)
        self.hnorm = RMSNorm(config, width)
        self.e_proj = ReplicatedLinear(config, width, width)
        self.h_proj = ReplicatedLinear(config, width, width)
        self.hc_head = HeadMix(config, architecture)
        self.norm = RMSNorm(config, width)

    def streams(self, h_TND: Tensor, next_TD: Tensor, given: BlockInput) -> Tensor:
        """Its streams `[T, N, D]` from those before and the embeddings of the next tokens;
        `given.token_ids` are the next tokens, too."""
        embedded_TD = self.e_proj(linear_input(self.enorm(next_TD), given.quant))
        rounded_TND = linear_input(self.hnorm(h_TND), given.quant)
        mixed_TND = embedded_TD.unsqueeze(1) + self.h_proj(rounded_TND)
        return self.forward(mixed_TND, given, Trace())

    def read(self, h_TND: Tensor) -> Tensor:
        """What the output head reads of its streams, `[T, D]`."""
        return self.norm.forward(self.hc_head.forward(h_TND))
