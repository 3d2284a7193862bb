"""Logits of all tokens never exist at once, forward or backward; values do not tell."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.trainer.megatron import parallel
from services.trainer.megatron.tracker import MemoryTracker
from services.trainer.models.deepseek_v4 import head
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.head import OutputHead
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from shared.planner import activations
from tests.tiny_deepseek_v4 import FLASH, SMALL, random_tokens

FP32, TEMPERATURE = 4, 0.7


@pytest.fixture(autouse=True, scope="module")
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    yield
    parallel.leave()


def all_at_once(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (x @ weight.t() / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"),
    [(256, FLASH.vocab_size, 16), (9000, 256, head.TOKEN_CHUNK)],
    ids=["the real vocabulary", "the real chunk"],
)
def test_the_head_holds_logits_of_one_chunk(
    monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int, chunk: int
) -> None:
    monkeypatch.setattr(head, "TOKEN_CHUNK", chunk)
    arch = replace(SMALL, hidden_size=16, vocab_size=vocabulary)
    layer = OutputHead(transformer_config(arch, initialise=True), arch)
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    cotangents = torch.randn(2, tokens, generator=torch.Generator().manual_seed(3))

    with MemoryTracker() as tracker:
        scores = layer.score(x, labels, TEMPERATURE)
        torch.autograd.backward([scores.logprobs, scores.entropy], list(cotangents))
    matrix, logits = vocabulary * 16 * FP32, chunk * vocabulary * FP32
    assert tracker.largest_bytes == max(logits, matrix)
    assert tracker.peak_bytes < 5.5 * logits + 4 * matrix < tokens * vocabulary * FP32

    ours = (scores.logprobs, scores.entropy, x.grad, layer.weight.grad)
    x.grad = layer.weight.grad = None
    expected = all_at_once(x, layer.weight, labels)
    torch.autograd.backward(expected, list(cotangents))
    for mine, other in zip(ours, (*expected, x.grad, layer.weight.grad), strict=True):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_pass_of_the_model_holds_logits_of_one_chunk() -> None:
    """Of the whole model, in which no other tensor is as large."""
    arch = replace(SMALL, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=1)
    arch = replace(arch, vocab_size=8192)
    model = DeepSeekV4(transformer_config(arch, initialise=True), arch)
    rows, length = 48, 128
    tokens = random_tokens(arch, rows=rows, length=length)
    positions = torch.arange(rows * length - 1)
    with MemoryTracker() as tracker:
        scores = model(tokens, positions_N=positions, labels_N=tokens.flatten()[1:])
        scores.logprobs.sum().backward()
    logits = head.TOKEN_CHUNK * arch.vocab_size * FP32
    assert tracker.largest_bytes == logits
    assert tracker.peak_bytes < rows * length * arch.vocab_size * FP32


def test_the_planner_knows_the_chunk() -> None:
    assert activations.TOKEN_CHUNK == head.TOKEN_CHUNK
