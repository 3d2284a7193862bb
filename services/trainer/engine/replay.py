"""The sampler's choices for the actor: unpacked from a sample, laid out as a micro-batch is.

Hash layers are left out, the actor reads the same table. Padding, and the last token of a row, of
which nothing is predicted, get the first experts and every entry: nobody attends to them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.trainer.models.deepseek_v4.trace import Routes
from services.trainer.packing import MicroBatch
from shared.errors import Rejected
from shared.job_actor import ReplaySection
from shared.messages import TrainingSample
from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture
from shared.routes import (
    TokenRoutes,
    first_selecting_token,
    indexed_layers,
    unpack_bits,
    unpack_routes,
)


def sample_routes(
    sample: TrainingSample, arch: Architecture, replay: ReplaySection
) -> TokenRoutes | None:
    """What the job replays of a sample. `Rejected` where it is missing or cannot be right."""
    if not replay.on:
        return None
    if sample.routes is None:
        raise Rejected(f"{sample.rollout_id} has no routes, which actor.replay asks for")
    try:
        return unpack_routes(
            sample.routes,
            arch,
            len(sample.token_ids) - 1,
            routing=replay.routing,
            indexer=replay.indexer,
            of=sample.rollout_id,
        )
    except ValueError as err:
        raise Rejected(str(err)) from err


def replayed(micro: MicroBatch, arch: Architecture, device: torch.device) -> Routes | None:
    """The choices of a micro-batch's rows, for every layer that makes one."""
    chosen = [(slab, slab.routes) for slab in micro.slabs if slab.routes is not None]
    if not chosen:
        return None
    assert len(chosen) == len(micro.slabs), "either all slabs have routes, or none"
    experts, entries = [], []
    for slab, routes in chosen:
        columns = slice(slab.first, slab.first + slab.token_ids.shape[1])
        shape = (len(slab.token_ids), slab.width, columns)
        ids = [one.expert_ids for one in routes if one.expert_ids is not None]
        bits = [one.entry_bits for one in routes if one.entry_bits is not None]
        experts.append(_experts(ids, arch, shape, device) if ids else {})
        entries.append(_entries(bits, arch, shape, device) if bits else {})
    replay = {layer: torch.cat([one[layer] for one in experts]) for layer in experts[0]}
    if len(entries) == 1:
        return Routes(replay, entries=entries[0])
    return Routes(replay, slabs=tuple(entries))


def _experts(
    recorded: Sequence[np.ndarray],
    arch: Architecture,
    shape: tuple[int, int, slice],
    device: torch.device,
) -> dict[int, Tensor]:
    rows, width, columns = shape
    learned = [layer for layer in range(arch.num_hidden_layers) if not arch.is_hash_routed(layer)]
    top_k = arch.num_experts_per_tok
    ids = np.empty((len(learned), rows, width, top_k), np.int64)
    ids[:] = np.arange(top_k)
    for row, of_row in enumerate(recorded):
        ids[:, row, : len(of_row)] = of_row[:, learned].swapaxes(0, 1)
    mine = ids[:, :, columns].reshape(len(learned), -1, top_k)
    flat = torch.from_numpy(mine).to(device)
    return dict(zip(learned, flat, strict=True))


def _entries(
    recorded: Sequence[np.ndarray],
    arch: Architecture,
    shape: tuple[int, int, slice],
    device: torch.device,
) -> dict[int, Tensor]:
    """Nothing for rows so short that every entry survives."""
    rows, width, columns = shape
    layers, first = indexed_layers(arch), first_selecting_token(arch)
    if width <= first:
        return {}
    num_entries = width // C4_RATIO
    kept = np.ones((len(layers), rows, width, num_entries), bool)
    for row, of_row in enumerate(recorded):
        selecting = unpack_bits(of_row[first:], num_entries)
        kept[:, row, first : len(of_row)] = selecting.swapaxes(0, 1)
    return dict(zip(layers, torch.from_numpy(kept[:, :, columns]).to(device), strict=True))
