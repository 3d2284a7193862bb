"""The sampler's inner states at every named point, of one sequence, beside whatever is sampled.

Runs the very functions that sample, over a cache of its own. Layers may be given another side's
streams, so that what a block departs by is its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run, Step
from services.rollout.models.deepseek_v4_weights import Derived
from shared.parity.trace import Recorder, StateArray, TraceRequest, stream_name


@torch.inference_mode()
def traced_states(
    model: Sampler, weights: Derived, request: TraceRequest
) -> list[dict[str, StateArray]]:
    """The states of each sequence. ValueError names what is out of bounds."""
    request.check(model.arch)
    recorder = Recorder(request, model.arch, _numpy)
    tracing, like = replace(model, trace=recorder), weights.embed
    for index, tokens in enumerate(request.sequences):
        recorder.begin_sequence()
        cache = Cache(
            model.arch, num_slots=1, max_tokens=len(tokens), dtype=like.dtype, device=like.device
        )
        step = cache.prefill_step([Run(0, 0, np.asarray(tokens, np.int64))])
        if request.streams is None:
            tracing.logits(weights, tracing.hidden(weights, cache, step))
        else:
            layers = request.layers or (0, model.arch.num_hidden_layers)
            given = _Given(request.streams[index], model, step, like)
            _isolated(tracing, weights, cache, step, given, range(*layers))
    return recorder.states


@dataclass(frozen=True, slots=True)
class _Given:
    """Another side's streams, padded like the step."""

    streams: Mapping[str, StateArray]
    model: Sampler
    step: Step
    like: Tensor

    def entering(self, layer: int) -> Tensor:
        """[N, S, D] that enter `layer`; those that enter one past the last go to the head."""
        name = stream_name(layer)
        if name not in self.streams:
            raise ValueError(f"streams lack {name}")
        values = self.streams[name].values
        expected = (self.step.num_tokens, self.model.arch.hc_mult, self.model.arch.hidden_size)
        if values.shape != expected:
            raise ValueError(f"{name}: expected {expected}, found {values.shape}")
        h_NSD = torch.tensor(values, dtype=self.like.dtype, device=self.like.device)
        missing = len(self.step.token_ids) - len(h_NSD)
        return functional.pad(h_NSD, (0, 0, 0, 0, 0, missing))


def _isolated(
    model: Sampler, weights: Derived, cache: Cache, step: Step, given: _Given, layers: range
) -> None:
    """Each layer on the streams that the other side gave it."""
    if layers.start == 0:
        model.first_streams(weights, step)
    for layer in layers:
        streams = given.entering(layer)
        model.block(layer, weights.blocks[layer], cache.layers[layer], step, streams)
    if layers.stop == model.arch.num_hidden_layers:
        model.logits(weights, model.last_hidden(weights, given.entering(layers.stop)))


def _numpy(value: Tensor) -> np.ndarray:
    """A copy: the model goes on in place."""
    value = value.detach().cpu()
    wide = value if value.dtype in (torch.bool, torch.float64) else value.float()
    return wide.numpy().copy()
