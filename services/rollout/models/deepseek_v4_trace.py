"""The sampler's inner states at every named point, of one sequence, beside whatever is sampled.

Runs the very functions that sample, over a cache of its own. Layers may be given another side's
streams, so that what a block departs by is its own.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run, Step
from services.rollout.models.deepseek_v4_weights import Derived
from shared.parity.trace import Recorder, StateArray, TraceRequest, stream_name


@torch.inference_mode()
def traced_states(model: Sampler, weights: Derived, request: TraceRequest) -> dict[str, StateArray]:
    """The states that are asked for. ValueError names what is out of bounds."""
    recorder = Recorder(request, model.arch, _numpy)
    tracing = replace(model, trace=recorder)
    tokens = np.asarray(request.token_ids, np.int64)
    if not 0 <= tokens.min() <= tokens.max() < model.arch.vocab_size:
        bad = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(f"token id {bad} is outside the vocabulary of {model.arch.vocab_size}")
    like = weights.embed
    cache = Cache(
        model.arch, num_slots=1, max_tokens=len(tokens), dtype=like.dtype, device=like.device
    )
    step = cache.prefill_step([Run(0, 0, tokens)])
    if request.streams is None:
        tracing.logits(weights, tracing.hidden(weights, cache, step))
    else:
        _isolated(tracing, weights, cache, step, request)
    return recorder.states


def _isolated(
    model: Sampler, weights: Derived, cache: Cache, step: Step, request: TraceRequest
) -> None:
    assert request.streams is not None
    num_layers = model.arch.num_hidden_layers
    first, stop = request.layers or (0, num_layers)
    for layer in range(first, stop):
        name = "embed" if layer == 0 else stream_name(layer - 1)
        h_NSD = _given(request.streams, name, model, step, weights.embed)
        model.block(layer, weights.blocks[layer], cache.layers[layer], step, h_NSD)
    if stop == num_layers:
        h_NSD = _given(request.streams, stream_name(num_layers - 1), model, step, weights.embed)
        model.logits(weights, model.last_hidden(weights, h_NSD))


def _given(
    streams: Mapping[str, StateArray], name: str, model: Sampler, step: Step, like: Tensor
) -> Tensor:
    """The other side's streams [N, S, D], padded like the step."""
    if name not in streams:
        raise ValueError(f"streams lack {name}")
    values = streams[name].values
    expected = (step.num_tokens, model.arch.hc_mult, model.arch.hidden_size)
    if values.shape != expected:
        raise ValueError(f"{name}: expected {expected}, found {values.shape}")
    h_NSD = torch.tensor(values, dtype=like.dtype, device=like.device)
    missing = len(step.token_ids) - len(h_NSD)
    return functional.pad(h_NSD, (0, 0, 0, 0, 0, missing))


def _numpy(value: Tensor) -> np.ndarray:
    """A copy: the model goes on in place."""
    value = value.detach().cpu()
    wide = value if value.dtype in (torch.bool, torch.float64) else value.float()
    return wide.numpy().copy()
