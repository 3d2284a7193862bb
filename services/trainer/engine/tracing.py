"""The actor's inner states at every named point, sequence by sequence, and nothing learnt."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.trace import Trace
from shared.errors import PartialModel
from shared.parity.trace import Recorder, StateArray, TraceRequest
from shared.quant.activation import ActivationQuant


@torch.no_grad()
def traced_states(
    model: DeepSeekV4, request: TraceRequest, quant: ActivationQuant
) -> list[dict[str, StateArray]]:
    """The states of each sequence. ValueError names what is out of bounds, or is
    `PartialModel`."""
    request.check(model.architecture)
    if request.streams is not None:
        raise ValueError("the trainer traces its own streams: give them to the sampler")
    if not has_whole_model(model):
        raise PartialModel("states are traced where one rank has the whole model, and no rank has")
    recorder = Recorder(request, model.architecture, _numpy)
    device = next(model.parameters()).device
    for tokens in request.sequences:
        recorder.begin_sequence()
        row = torch.from_numpy(np.asarray(tokens, np.int64)).unsqueeze(0).to(device)
        model(row, quant=quant, trace=Trace(states=_Rows(recorder)))
    return recorder.states


def has_whole_model(model: DeepSeekV4) -> bool:
    """Whether this rank computes every state of every token by itself."""
    config = model.config
    sizes = (config.tensor_model_parallel_size, config.context_parallel_size)
    return max(sizes) == 1 and model.pre_process and model.post_process


@dataclass(frozen=True, slots=True)
class _Rows:
    """Passes states on without their batch dimension, which is one."""

    recorder: Recorder

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.recorder(name, value.squeeze(0))


def _numpy(value: Tensor) -> np.ndarray:
    wide = value if value.dtype in (torch.bool, torch.float64) else value.float()
    return wide.cpu().numpy()
