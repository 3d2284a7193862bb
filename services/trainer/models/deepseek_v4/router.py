"""Chooses the experts of every token and weighs them. FP32 from gate to weight.

Hash layers read the choice from the token id, other layers take the best of score + bias. The bias
selects, it never weighs; the weights always come from the current scores, also when routes replay.
"""

# T tokens, D model width, E experts, k experts per token
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from services.trainer.models.deepseek_v4.layers import new_parameter, wide
from services.trainer.models.deepseek_v4.trace import Routes
from shared.models.deepseek_v4.architecture import Architecture


class Router(nn.Module):
    def __init__(
        self, config: TransformerConfig, architecture: Architecture, *, layer: int
    ) -> None:
        super().__init__()
        a = architecture
        self.layer = layer
        self.top_k = a.num_experts_per_tok
        self.route_scale = a.routed_scaling_factor
        self.weight = new_parameter(config, a.n_routed_experts, a.hidden_size)
        self.tid2eid: Tensor | None
        if a.is_hash_routed(layer):
            self.register_parameter("bias", None)
            table = torch.zeros(a.vocab_size, self.top_k, dtype=torch.int64)
            self.register_buffer("tid2eid", table)  # never trained, travels with the weights
        else:
            # No gradient can reach a bias that only selects, so it is no trainable parameter.
            bias = torch.zeros(a.n_routed_experts, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)
            self.register_buffer("tid2eid", None)

    def forward(self, x_TD: Tensor, token_ids_T: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """-> expert ids `[T, k]` int64 and their weights `[T, k]` FP32."""
        scores_TE = sqrt_softplus(linear(wide(x_TD), wide(self.weight)))
        ids_Tk = self._choose(scores_TE.detach(), token_ids_T, routes)
        if routes.record is not None:
            routes.record[self.layer] = ids_Tk
        chosen_Tk = scores_TE.gather(1, ids_Tk)
        total_T1 = chosen_Tk.sum(-1, keepdim=True) + 1e-20
        return ids_Tk, chosen_Tk / total_T1 * self.route_scale

    def _choose(self, scores_TE: Tensor, token_ids_T: Tensor, routes: Routes) -> Tensor:
        if self.tid2eid is not None:
            return self.tid2eid[token_ids_T]
        if self.layer in routes.replay:
            return routes.replay[self.layer]
        # Stable, so that equal scores go to the lower expert whatever the batch.
        ranked_TE = (scores_TE + self.bias).sort(dim=-1, descending=True, stable=True).indices
        return ranked_TE[:, : self.top_k]


def sqrt_softplus(logits: Tensor) -> Tensor:
    """`sqrt(log(1 + e^x))`, 0 where e^x underflows; there its gradient is 0 instead of infinite.

    A floor under the value would spread a token evenly whose experts all score 0: other
    implementations send it to none.
    """
    value = softplus(logits)
    smallest = torch.finfo(logits.dtype).tiny
    return torch.where(value < smallest, value.detach().sqrt(), value.clamp_min(smallest).sqrt())
