"""Recorded routes as a micro-batch lays them out, whole and cut over context-parallel ranks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.engine.replay import replayed
from services.trainer.packing import MicroBatch, ScoredSequence, context_part, pack
from shared.models.deepseek_v4.architecture import C4_RATIO
from shared.routes import first_selecting_token, unpack_bits
from tests.tiny_deepseek_v4 import DEMO
from tests.unit.shared.test_routes import random_routes

CPU = torch.device("cpu")
LENGTHS = (33, 20, 12)


def micro_batch(alignment: int = 16):
    sequences = [
        ScoredSequence(np.arange(num), num // 2, random_routes(num - 1, seed=num))
        for num in LENGTHS
    ]
    ((micro,),) = pack(sequences, max_tokens=1000, alignment=alignment)
    return micro, sequences


def laid_out(micro: MicroBatch) -> list[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Of each slab: experts [B, S, k] and entries [B, S, W] by layer."""
    routes = replayed(micro, DEMO, CPU)
    assert routes is not None
    assert sorted(routes.replay) == [2, 3]  # hash layers read the table
    sizes = [slab.token_ids.size for slab in micro.slabs]
    found = []
    for number, slab in enumerate(micro.slabs):
        rows, columns = slab.token_ids.shape
        experts = {
            layer: ids.split(sizes)[number].view(rows, columns, -1)
            for layer, ids in routes.replay.items()
        }
        entries = routes.of_slab(number).entries
        assert sorted(entries) == [1, 3]
        found.append((experts, entries))
    return found


def test_every_row_has_its_own_routes_and_padding_does_no_harm() -> None:
    micro, sequences = micro_batch()
    assert [slab.width for slab in micro.slabs] == [48, 32, 16]
    first = first_selecting_token(DEMO)
    for one, slab, (experts, entries) in zip(sequences, micro.slabs, laid_out(micro), strict=True):
        recorded, inputs = one.routes, len(one.token_ids) - 1
        assert recorded is not None
        for layer, (ids,) in experts.items():
            assert np.array_equal(ids[:inputs], recorded.expert_ids[:, layer])
            assert (ids[inputs:] == torch.arange(2)).all()
        for at, layer in enumerate((1, 3)):
            (kept,) = entries[layer]
            expected = unpack_bits(recorded.entry_bits[:, at], slab.width // C4_RATIO)
            assert np.array_equal(kept[first:inputs], expected[first:])
            assert kept[:first].all()
            assert kept[inputs:].all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_ranks_have_their_columns(ranks: int) -> None:
    micro, _ = micro_batch(alignment=16 * ranks)
    whole = laid_out(micro)
    parts = [laid_out(context_part(micro, rank, ranks)) for rank in range(ranks)]
    for number, kinds in enumerate(whole):
        for kind, by_layer in enumerate(kinds):
            for layer, expected in by_layer.items():
                mine = [part[number][kind][layer] for part in parts]
                assert torch.equal(torch.cat(mine, 1), expected)


def test_without_routes_nothing_is_replayed() -> None:
    ((micro,),) = pack([ScoredSequence(np.arange(20), 5)], max_tokens=100)
    assert replayed(micro, DEMO, CPU) is None
