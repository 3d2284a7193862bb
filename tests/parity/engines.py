"""The implementations behind one face: weights and tokens in, logits or named inner states out.

    reference     plain PyTorch (shared)              actor         Megatron-core (trainer)
    transformers  an independent implementation       sampler       slots and steps (rollout)

Weights are values by release name; nothing here knows what a runtime calls them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from services.rollout.models.deepseek_v4_weights import Derived, derive
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.trace import Trace
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, quantise_tensor
from shared.models.deepseek_v4.reference import Reference
from shared.models.deepseek_v4.runtimes import to_runtime
from shared.parity.trace import Recorder, TraceRequest, split_point
from shared.quant.activation import UNQUANTISED, ActivationQuant
from shared.quant.policy import POLICIES
from tests.tiny_deepseek_v4 import ALIGNED, DEMO, SMALL, UNSCALED, random_tokens, random_weights

Weights = Mapping[str, Tensor]
States = dict[str, Tensor]

MODELS = {"aligned": ALIGNED, "small": SMALL, "demo": DEMO, "unscaled": UNSCALED}
LENGTH = 300  # two entries of 128, dozens of 4, several windows and query chunks
BOUND = 2e-5  # of the largest logit, in FP32
QUANTISED_BOUND = 1e-10  # on logits, in float64: a rounding that flips a code would show
GRADIENT_BOUND = 1e-4  # of the norm of each gradient

CHUNKS = (7, 1, 112, *(1,) * 16, 114, *(1,) * 12, 38)
"""Prefills that end inside blocks of every ratio, single tokens across token 128 and 256."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model with random weights and tokens, and what transformers makes of them."""

    arch: Architecture
    weights: Weights
    tokens: Tensor  # [B, S]
    logits: Tensor  # [B, S, V]


@functools.cache
def case(name: str, spread: float = 1.0, *, rows: int = 2, seed: int = 3) -> Case:
    """Built once a session; whoever changes weights copies the dictionary first."""
    arch = MODELS[name]
    weights = random_weights(arch, seed=seed, spread=spread)
    tokens = random_tokens(arch, rows=rows, length=LENGTH)
    with torch.no_grad():
        return Case(arch, weights, tokens, twin(arch, weights)(tokens).logits)


def twin(arch: Architecture, weights: Weights) -> DeepseekV4ForCausalLM:
    """transformers' model with these weights; strict, so every tensor finds its place."""
    config = DeepseekV4Config(**arch.to_config(), attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config).eval()
    model.load_state_dict(to_runtime(weights, arch, "transformers"), strict=True)
    return model


def departure(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def reference_logits(
    arch: Architecture,
    weights: Weights,
    tokens: Tensor,
    *,
    quant: ActivationQuant = UNQUANTISED,
    states: States | None = None,
) -> Tensor:
    trace = None if states is None else states.__setitem__
    return Reference(weights, arch, quant=quant).forward(tokens, trace=trace).logits


def actor(arch: Architecture, weights: Weights) -> DeepSeekV4:
    """The trainer's model in FP32, its routers trainable."""
    model = DeepSeekV4(transformer_config(arch), arch, freeze_router=False)
    load_weights(model, weights)
    return model


@torch.no_grad()
def actor_logits(
    arch: Architecture, weights: Weights, tokens: Tensor, *, states: States | None = None
) -> Tensor:
    return actor(arch, weights)(tokens, trace=Trace(states=states))


def sampler_logits(
    arch: Architecture,
    weights: Weights,
    tokens: Tensor,
    *,
    chunks: Sequence[int] = (),
    quant: ActivationQuant = UNQUANTISED,
    dtype: torch.dtype = torch.float32,
    states: States | None = None,
) -> Tensor:
    """One prefill, or `chunks` of it, of which those of one token are decoding steps.

    `weights` are values, or a release's stored tensors with their scales. States are kept for one
    prefill of one row only, without the rows that pad its step.
    """
    assert states is None or (not chunks and len(tokens) == 1)
    recorder = Recorder(TraceRequest(sequences=[tokens[0]]), arch)
    recorder.begin_sequence()

    def trace(name: str, value: Tensor) -> None:
        if states is not None:
            recorder(name, value.clone())
            states[name] = recorder.states[0][name].values

    cache = Cache(arch, num_slots=2 * len(tokens), max_tokens=LENGTH + 20, dtype=dtype)
    run = SamplerRun(Sampler(arch, quant, trace), derive(arch, weights, dtype=dtype), cache)
    return torch.cat([run.feed(part) for part in _split(tokens, chunks)], 1)


@torch.inference_mode()
def sampler_states_in_steps(
    arch: Architecture, weights: Weights, tokens: Tensor, chunks: Sequence[int]
) -> tuple[Tensor, States]:
    """Logits, and the states of one row joined to those of a single prefill. After every chunk of
    several tokens the sequence goes on in a copy of its slot, as the samples of a prompt do."""
    (row,) = tokens.numpy()
    cache = Cache(arch, num_slots=1 + len(chunks), max_tokens=len(row) + 20)
    joined, derived = _Joined(arch, len(row)), derive(arch, weights)
    sampler, slot = Sampler(arch, UNQUANTISED, joined), 0
    for part in np.split(row, np.cumsum(chunks)[:-1]):
        at = joined.begin_step(len(part))
        if len(part) == 1:
            step = cache.decode_step(np.array([slot]), np.array([at]), part)
        else:
            step = cache.prefill_step([Run(slot, at, part)])
        sampler.logits(derived, sampler.hidden(derived, cache, step))
        if len(part) > 1:
            cache.copy([slot], [slot + 1])
            slot += 1
    return joined.states["logits"].unsqueeze(0), joined.states


@dataclass(slots=True)
class _Joined:
    """Takes what a sampler traces step by step, without the rows that pad a step."""

    arch: Architecture
    length: int
    states: States = field(default_factory=dict)
    start: int = 0
    stop: int = 0

    def begin_step(self, tokens: int) -> int:
        """-> position of its first token."""
        self.start, self.stop = self.stop, self.stop + tokens
        return self.start

    def __call__(self, name: str, value: Tensor) -> None:
        layer, part = split_point(name)
        ratio = 0 if layer is None else self.arch.compress_ratios[layer]
        if part == "attn.compressor":  # entries that the step's tokens close
            value = value[: self.stop // ratio - self.start // ratio]
        elif part.startswith("attn.indexer"):  # entries so far, of the step's one sequence
            value = value.flatten(0, -3)[0] if value.dim() > 2 else value
            value = value[: self.stop - self.start, : self.length // ratio]
            unseen = False if value.dtype == torch.bool else -torch.inf
            missing = self.length // ratio - value.shape[1]
            value = functional.pad(value, (0, missing), value=unseen)
        else:
            value = value[: self.stop - self.start]
        before = [self.states[name]] if name in self.states else []
        self.states[name] = torch.cat((*before, value.clone()))


@dataclass(slots=True)
class SamplerRun:
    """Rows of equal length, in slots of no order: a slot's number must not matter."""

    sampler: Sampler
    derived: Derived
    cache: Cache
    length: int = 0

    def feed(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of the next tokens of every row."""
        rows, length = tokens_BS.shape
        slots = 2 * np.arange(rows)[::-1] + 1
        if length == 1:
            positions = np.full(rows, self.length)
            step = self.cache.decode_step(slots, positions, tokens_BS[:, 0].numpy())
        else:
            pairs = zip(slots.tolist(), tokens_BS.numpy(), strict=True)
            step = self.cache.prefill_step([Run(slot, self.length, row) for slot, row in pairs])
        self.length += length
        hidden = self.sampler.hidden(self.derived, self.cache, step)[: rows * length]
        return self.sampler.logits(self.derived, hidden).view(rows, length, -1)


def stored(arch: Architecture, weights: Weights) -> dict[str, Tensor]:
    """Codes, scales and values as a release in the architecture's format keeps them."""
    policy = POLICIES[arch.weight_format]
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors |= quantise_tensor(name, weight, policy=policy)
    return tensors


def stored_values(tensors: Weights) -> dict[str, Tensor]:
    """What a stored release means, in float64."""
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in dequantised(tensors).items()
    }


def _split(tokens: Tensor, chunks: Sequence[int]) -> Sequence[Tensor]:
    if not chunks:
        return [tokens]
    assert sum(chunks) == tokens.shape[1], (sum(chunks), tokens.shape)
    return tokens.split(list(chunks), 1)
