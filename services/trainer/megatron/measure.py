"""What a training step of one rank really holds: counted on a CPU, to be held beside the plan."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from services.trainer.fp8.products import EXACT, Products, products_as
from services.trainer.megatron.optimizer import build_optimizer, wrap
from services.trainer.megatron.tracker import MemoryTracker
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.packing import ScoredSequence, pack
from shared.job_actor import OffloadSection, OptimizerSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes; `activations` is the peak of forward and backward above the states, `optimizer` counts
    what is offloaded, too: on a CPU all is host memory."""

    weights: int
    gradients: int
    optimizer: int
    activations: int


def measure(architecture: Architecture, setup: Setup, *, products: Products = EXACT) -> Measured:
    """One micro-batch of `setup` through a new model of one rank; Megatron's groups exist."""
    with MemoryTracker() as tracker:
        config, model = _model(architecture, setup)
        weights = tracker.live_bytes
        wrapped = wrap(model, config)
        gradients = tracker.live_bytes - weights
        _ = build_optimizer(wrapped, config, _settings(setup))
        states = tracker.live_bytes
        sequences = _samples(architecture, setup)
        tracker.restart_peak()
        with products_as(model, products):
            _one_pass(wrapped, sequences, setup)
        return Measured(
            weights, gradients, states - weights - gradients, tracker.peak_bytes - states
        )


def built(architecture: Architecture, setup: Setup) -> tuple[DeepSeekV4, MegatronOptimizer]:
    """A new model of one rank, and its optimiser."""
    config, model = _model(architecture, setup)
    return model, build_optimizer(wrap(model, config), config, _settings(setup))


def _model(architecture: Architecture, setup: Setup) -> tuple[TransformerConfig, DeepSeekV4]:
    config = transformer_config(architecture, dtype=setup.dtype, initialise=True)
    model = DeepSeekV4(
        config,
        architecture,
        freeze_router=setup.freeze_router,
        train_mtp=setup.trains_mtp,
    )
    model.recompute(setup.recompute, setup.recomputed_blocks)
    return config, model


def _settings(setup: Setup) -> OptimizerSection:
    return OptimizerSection(offload=OffloadSection(fraction=setup.offload))


def _samples(architecture: Architecture, setup: Setup) -> list[ScoredSequence]:
    length, responses = setup.sample_tokens, setup.response_tokens
    generator = np.random.default_rng(0)
    return [
        ScoredSequence(generator.integers(0, architecture.vocab_size, length), length - responses)
        for _ in range(setup.rows)
    ]


def _one_pass(wrapped: torch.nn.Module, sequences: list[ScoredSequence], setup: Setup) -> None:
    """Forward and backward of any loss: what is kept does not depend on which."""
    ((micro,),) = pack(sequences, max_tokens=setup.max_tokens)
    scores = wrapped(
        tuple(torch.from_numpy(slab.token_ids) for slab in micro.slabs),
        positions_N=torch.from_numpy(micro.positions),
        labels_N=torch.from_numpy(micro.labels),
    )
    loss = scores.logprobs.mean().neg()
    if setup.trains_mtp:
        loss = loss - scores.mtp_logprobs.mean()
    loss.backward()
