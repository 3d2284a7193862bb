"""The committed policy: every kind of layer, a release a loader accepts, any text round-trips."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from scripts.arithmetic import split
from scripts.byte_tokenizer import EOS, FIRST_BYTE, VOCAB_SIZE, encode_bytes
from scripts.make_tiny_policy import ARCHITECTURE, NUM_HELDOUT, NUM_TRAIN, random_weights
from scripts.warm_up import balance, stored
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.models.deepseek_v4.reference import Reference
from shared.tokenizer import CheckpointTokenizer

FOLDER = Path("assets/tiny-dsv4")

TEXTS = [
    "37+48=",
    "Let $x \\in \\mathbb{R}$; find\n\tx² ≤ 10⁻³.",
    "漢字 🎉 e\u0301 \r\n  spaces  ",
    "".join(map(chr, range(0x250))),
    "",
]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return dequantised(load_release(FOLDER))


def test_policy_is_what_its_script_describes() -> None:
    assert Architecture.load(FOLDER) == ARCHITECTURE
    kinds = [ARCHITECTURE.kind(layer) for layer in range(4)]
    assert kinds == ["window", "c4", "pooled", "c4"]
    assert [ARCHITECTURE.is_hash_routed(layer) for layer in range(4)] == [True, True, False, False]


def test_policy_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8 * 2**20


def test_no_tensor_is_constant(weights: dict[str, torch.Tensor]) -> None:
    constant = [n for n, t in weights.items() if t.numel() > 1 and t.min() == t.max()]
    assert constant == []


def test_hash_rows_hold_distinct_experts(weights: dict[str, torch.Tensor]) -> None:
    for layer in (0, 1):
        table = weights[f"layers.{layer}.ffn.gate.tid2eid"]
        assert table.shape == (VOCAB_SIZE, 2)
        assert (table[:, 0] != table[:, 1]).all()


def test_learned_routers_use_every_expert_and_indexers_select(
    weights: dict[str, torch.Tensor],
) -> None:
    _, heldout = split(0, num_train=NUM_TRAIN, num_heldout=NUM_HELDOUT)
    rows = torch.tensor([encode_bytes((p.prompt + p.worked)[:24]) for p in heldout])
    seen: dict[str, torch.Tensor] = {}
    Reference(weights, ARCHITECTURE).forward(rows, trace=seen.__setitem__)
    for layer in (2, 3):
        share_E = (seen[f"layers.{layer}.router"] > 0).float().mean((0, 1)) / 2
        assert share_E.min() > 0.02
    for layer in (1, 3):
        chosen_BSW = seen[f"layers.{layer}.attn.indexer"]
        visible = 6  # of 24 tokens
        assert chosen_BSW.shape[-1] == visible
        assert (chosen_BSW[:, -1].sum(-1) == 3).all()
        assert len({tuple(row) for row in chosen_BSW[:, -1].tolist()}) > 1


def test_storing_twice_changes_nothing(weights: dict[str, torch.Tensor]) -> None:
    again = stored(weights, ARCHITECTURE)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_random_weights_depend_on_the_seed_alone() -> None:
    one, two, other = (
        random_weights(ARCHITECTURE, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one)


def test_balance_raises_the_bias_of_experts_used_too_little() -> None:
    weights = {"layers.2.ffn.gate.bias": torch.zeros(4)}
    usage = {
        "layers.2.router": torch.tensor([0.1, 0.4, 0.25, 0.25]),
        "layers.0.router": torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    balance(weights, usage, rate=0.5)
    assert weights["layers.2.ffn.gate.bias"].tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_goes_in_and_comes_out(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    token_ids = tokenizer.encode(text).ids
    assert token_ids == encode_bytes(text)
    assert tokenizer.decode(token_ids) == text


def test_every_id_of_the_vocabulary_decodes() -> None:
    tokenizer = CheckpointTokenizer.load(FOLDER)
    assert tokenizer.tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.stop_token_ids == (EOS,)
    special = [*range(FIRST_BYTE), *range(FIRST_BYTE + 256, VOCAB_SIZE)]
    assert tokenizer.decode([*special, FIRST_BYTE + ord("a")]) == "a"
