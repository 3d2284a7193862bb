"""Rotary angles at every position of the release: three engines, the same bits."""

from dataclasses import replace

import torch

from services.rollout.models.deepseek_v4_cache import Cache
from services.trainer.models.deepseek_v4.rope import rotations as trained
from shared.models.deepseek_v4.reference import rotations
from tests.tiny_deepseek_v4 import FLASH

ARCH = replace(
    FLASH,
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    compress_ratios=(0, 1 << 19),
    num_hash_layers=2,
    head_dim=16,
    qk_rope_head_dim=12,
)
"""Few channels, so that tables of a million positions are small; with YaRN and without."""
POSITIONS = FLASH.max_position_embeddings


def test_sampler_and_trainer_turn_as_the_reference_up_to_a_million_positions() -> None:
    cache = Cache(ARCH, num_slots=1, max_tokens=POSITIONS)
    for layer in (0, 1):
        expected = rotations(ARCH, layer, torch.arange(POSITIONS), torch.float32)
        sampled = cache._turns[layer][:, 0]
        assert torch.equal(torch.view_as_real(sampled), torch.view_as_real(expected))
        frequencies = ARCH.rope_frequencies(layer)
        turns = trained(frequencies, POSITIONS, torch.device("cpu"))
        assert torch.equal(torch.view_as_real(turns), torch.view_as_real(expected))


def test_a_few_positions_have_the_bits_of_the_whole_table() -> None:
    """A step asks for the positions of its tokens, wherever they lie."""
    for positions in ([0], [299, 300], [131_071], [POSITIONS - 3, POSITIONS - 2, POSITIONS - 1]):
        whole = rotations(ARCH, 1, torch.arange(POSITIONS), torch.float32)
        some = rotations(ARCH, 1, torch.tensor(positions), torch.float32)
        assert torch.equal(torch.view_as_real(some), torch.view_as_real(whole[positions]))
