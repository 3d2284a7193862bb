"""Recorded routes as a micro-batch lays them out, whole and cut over context-parallel ranks."""

import numpy as np
import pytest
import torch

from services.trainer.engine.replay import replayed
from services.trainer.packing import ScoredSequence, context_part, pack
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


def test_every_row_has_its_own_routes_and_padding_does_no_harm() -> None:
    micro, sequences = micro_batch()
    routes = replayed(micro, DEMO, CPU)
    assert routes is not None
    rows, width = micro.token_ids.shape
    assert sorted(routes.replay) == [2, 3]  # hash layers read the table
    assert sorted(routes.entries) == [1, 3]
    first = first_selecting_token(DEMO)
    for row, one in enumerate(sequences):
        recorded, inputs = one.routes, len(one.token_ids) - 1
        for layer, ids in routes.replay.items():
            mine = ids.view(rows, width, -1)[row]
            assert np.array_equal(mine[:inputs], recorded.expert_ids[:, layer])
            assert (mine[inputs:] == torch.arange(2)).all()
        for at, layer in enumerate((1, 3)):
            kept = routes.entries[layer][row]
            expected = unpack_bits(recorded.entry_bits[:, at], width // C4_RATIO)
            assert np.array_equal(kept[first:inputs], expected[first:])
            assert kept[:first].all()
            assert kept[inputs:].all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_ranks_have_their_columns(ranks: int) -> None:
    micro, _ = micro_batch(alignment=16 * ranks)
    whole = replayed(micro, DEMO, CPU)
    parts = [replayed(context_part(micro, rank, ranks), DEMO, CPU) for rank in range(ranks)]
    rows, width = micro.token_ids.shape
    for layer, ids in whole.replay.items():
        mine = [part.replay[layer].view(rows, width // ranks, -1) for part in parts]
        assert torch.equal(torch.cat(mine, 1), ids.view(rows, width, -1))
    for layer, kept in whole.entries.items():
        assert torch.equal(torch.cat([part.entries[layer] for part in parts], 1), kept)


def test_without_routes_nothing_is_replayed() -> None:
    ((micro,),) = pack([ScoredSequence(np.arange(20), 5)], max_tokens=100)
    assert replayed(micro, DEMO, CPU) is None
