"""The same tokens on every rung of the attribution's ladder (shared/parity/attribution.py).

Choices of the sampler are those that it recorded; where it recorded none they are made again by the
sampling version, rounding as the sampler does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.trainer.engine.published import holding_version
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.trace import Trace
from services.trainer.packing import ScoredSequence
from shared.job_actor import ReplaySection
from shared.messages import TrainingSample
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.trace import TraceRounding
from shared.quant.activation import ActivationQuant
from shared.routes import TokenRoutes, indexed_layers, num_entry_bytes, pack_bits, unpack_routes

Rounded = Callable[[], AbstractContextManager[ActivationQuant]]
Score = Callable[[list[ScoredSequence], TraceRounding], np.ndarray]
Ladder = dict[str, np.ndarray]


def climb(
    model: DeepSeekV4,
    samples: Sequence[TrainingSample],
    score: Score,
    *,
    rounded: Rounded,
    recorded: ReplaySection,
    folders: Mapping[int, Path],
) -> Ladder:
    """Log p [N] of all response tokens by rung; `folders` are of the versions that sampled, where
    they are not what the model holds. Within `rounded` the model has its weights as published, and
    rounds activations as given; `recorded` says which choices the samples carry."""
    plain = [_sequence(sample, None) for sample in samples]
    routes = [_choices(model, sample, rounded, recorded, folders) for sample in samples]
    routed = [
        _sequence(sample, replace(one, entry_bits=None))
        for sample, one in zip(samples, routes, strict=True)
    ]
    selected = [_sequence(sample, one) for sample, one in zip(samples, routes, strict=True)]
    ladder = {
        "own": score(plain, "own"),
        "quantised": score(plain, "sampler"),
        "routed": score(routed, "sampler"),
        "selected": score(selected, "sampler"),
    }
    return ladder | {"sampled": _at_versions(model, samples, selected, score, ladder, folders)}


def _at_versions(
    model: DeepSeekV4,
    samples: Sequence[TrainingSample],
    selected: list[ScoredSequence],
    score: Score,
    ladder: Ladder,
    folders: Mapping[int, Path],
) -> np.ndarray:
    """Every token under the version that sampled it."""
    spans = [span for sample in samples for span in sample.spans]
    version_of = np.repeat(
        [span.policy_version for span in spans], [span.num_tokens for span in spans]
    )
    found = ladder["selected"].copy()
    for version, folder in folders.items():
        with holding_version(model, folder):
            there = score(selected, "sampler")
        found[version_of == version] = there[version_of == version]
    return found


def _sequence(sample: TrainingSample, routes: TokenRoutes | None) -> ScoredSequence:
    return ScoredSequence(np.asarray(sample.token_ids, np.int64), sample.num_prompt_tokens, routes)


def _choices(
    model: DeepSeekV4,
    sample: TrainingSample,
    rounded: Rounded,
    recorded: ReplaySection,
    folders: Mapping[int, Path],
) -> TokenRoutes:
    inputs = np.asarray(sample.token_ids[:-1], np.int64)
    known = TokenRoutes(None, None)
    if sample.routes is not None:
        known = unpack_routes(
            sample.routes,
            model.architecture,
            len(inputs),
            routing=recorded.routing,
            indexer=recorded.indexer,
            of=sample.rollout_id,
        )
    if known.expert_ids is not None and known.entry_bits is not None:
        return known
    folder = folders.get(sample.oldest_version)
    with rounded() as quant:
        if folder is None:
            made = _made_again(model, inputs, quant)
        else:
            with holding_version(model, folder):
                made = _made_again(model, inputs, quant)
    return TokenRoutes(
        made.expert_ids if known.expert_ids is None else known.expert_ids,
        made.entry_bits if known.entry_bits is None else known.entry_bits,
    )


@torch.no_grad()
def _made_again(model: DeepSeekV4, tokens: np.ndarray, quant: ActivationQuant) -> TokenRoutes:
    """What routers and indexers choose at each of `tokens`."""
    states: dict[str, torch.Tensor] = {}
    device = next(model.parameters()).device
    row = torch.from_numpy(tokens).unsqueeze(0).to(device)
    model(row, quant=quant, trace=Trace(states=states))
    return TokenRoutes(
        _experts(states, model.architecture), _entries(states, model.architecture, len(tokens))
    )


def _experts(states: Mapping[str, torch.Tensor], arch: Architecture) -> np.ndarray:
    by_layer = []
    for layer in range(arch.num_hidden_layers):
        weights_TE = states[f"layers.{layer}.router"][0]
        by_layer.append(weights_TE.topk(arch.num_experts_per_tok, -1).indices)
    return torch.stack(by_layer, 1).cpu().numpy()


def _entries(states: Mapping[str, torch.Tensor], arch: Architecture, num_tokens: int) -> np.ndarray:
    size = num_entry_bytes(num_tokens)
    by_layer = [
        pack_bits(states[f"layers.{layer}.attn.indexer"][0].cpu().numpy(), size)
        for layer in indexed_layers(arch)
    ]
    return np.stack(by_layer, 1) if by_layer else np.zeros((num_tokens, 0, size), np.uint8)
