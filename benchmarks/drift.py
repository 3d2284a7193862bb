"""Where sampler and trainer drift apart: each source alone, on tokens that the policy samples.

`python -m benchmarks.drift [--prompts 32] [--out FILE]`. One checkpoint, so that both sides have
the same weights; every row changes one thing on one side and compares log-probabilities of the same
response tokens. docs/numerics.md explains the rows.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron is imported

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from services.rollout.models.deepseek_v4 import Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from services.rollout.models.deepseek_v4_weights import derive
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.trace import Routes
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import dequantised, load_release
from shared.models.deepseek_v4.reference import Reference
from shared.parity.offline import sample
from shared.parity.offline_request import OfflineRequest, Side
from shared.parity.scores import ScoredSequence, compare
from shared.quant.activation import RELEASE, SERVED, UNQUANTISED, ActivationQuant
from shared.tokenizer import CheckpointTokenizer

RESPONSE_TOKENS, SAMPLES = 24, 4
PREFILLED = 4  # tokens before decoding begins

ROUNDINGS: dict[str, ActivationQuant] = {
    "inputs of linears": ActivationQuant(linear=True),
    "keys": ActivationQuant(kv=True),
    "indexer in FP8": ActivationQuant(indexer="fp8"),
    "indexer in FP4": ActivationQuant(indexer="fp4"),
    "all, indexer in FP8": SERVED,
    "all, indexer in FP4": RELEASE,
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled sequences: prompts end before `first`; rows are padded on the right."""

    sequences: list[list[int]]
    first: list[int]
    padded: Tensor  # [B, T]


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    mean: float
    p50: float
    p99: float
    max: float


@torch.no_grad()
def measure(checkpoint: Path, prompts: Sequence[str]) -> Iterator[Row]:
    arch, stored = Architecture.load(checkpoint), load_release(checkpoint)
    weights = dequantised(stored)
    tokens = sampled_tokens(checkpoint, weights, arch, prompts)
    sides = Sides(arch, weights, stored, tokens.padded)
    exact = sides.reference(UNQUANTISED)
    trainer = sides.actor("float32")
    whole, decoded = sides.sampler(RELEASE), sides.sampler(RELEASE, decode=True)

    def row(what: str, ours: Tensor, theirs: Tensor) -> Row:
        return compared(what, ours, theirs, tokens)

    yield row("trainer against reference, FP32", trainer, exact)
    yield row("sampler against trainer, FP32", sides.sampler(UNQUANTISED), trainer)
    decoding = sides.sampler(UNQUANTISED, decode=True)
    yield row("sampler decoding against prefill, FP32", decoding, sides.sampler(UNQUANTISED))
    yield row("sampler decoding against prefill, rounding", decoded, whole)
    yield row("sampler against reference, both rounding", whole, sides.reference(RELEASE))
    for name, quant in ROUNDINGS.items():
        yield row(f"rounding {name}", sides.reference(quant), exact)
    yield row("trainer in BF16 against FP32", sides.actor("bfloat16"), trainer)
    yield row("sampler rounding against trainer, FP32", decoded, trainer)
    chosen = sides.routes(RELEASE)
    for what, routes in (
        ("its experts", Routes(replay=chosen.replay)),
        ("its entries", Routes(entries=chosen.entries)),
        ("both", chosen),
    ):
        replayed = sides.actor("float32", routes=routes)
        yield row(f"the same, the trainer replaying {what}", decoded, replayed)


@dataclass(frozen=True, slots=True)
class Sides:
    """Logits [B, T, V] of the same tokens by each implementation."""

    arch: Architecture
    weights: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    tokens: Tensor

    def reference(self, quant: ActivationQuant) -> Tensor:
        return Reference(self.weights, self.arch, quant=quant).forward(self.tokens).logits

    def actor(self, dtype: str, *, routes: Routes | None = None) -> Tensor:
        model = DeepSeekV4(transformer_config(self.arch, dtype=dtype), self.arch)
        load_weights(model, self.weights)
        logits = model(self.tokens, routes=routes)
        assert isinstance(logits, Tensor)
        return logits

    def routes(self, quant: ActivationQuant) -> Routes:
        """The experts and entries that a rounding side chooses."""
        chosen = Routes()

        def keep(name: str, value: Tensor) -> None:
            if name.endswith(".router"):
                top = value.flatten(0, 1).topk(self.arch.num_experts_per_tok, -1).indices
                chosen.replay[int(name.split(".")[1])] = top
            if name.endswith(".attn.indexer"):
                chosen.entries[int(name.split(".")[1])] = value

        Reference(self.weights, self.arch, quant=quant).forward(self.tokens, trace=keep)
        return chosen

    def sampler(self, quant: ActivationQuant, *, decode: bool = False) -> Tensor:
        """One prefill; or a short one, then a token at a time."""
        rows, length = self.tokens.shape
        weights = derive(self.arch, self.stored)
        cache = Cache(self.arch, num_slots=rows, max_tokens=length + 1)
        model, parts = Sampler(self.arch, quant), []
        begin = PREFILLED if decode else length
        runs = [Run(slot, 0, row[:begin].numpy()) for slot, row in enumerate(self.tokens)]
        steps = [(cache.prefill_step(runs), begin)]
        for at in range(begin, length):
            positions, ids = np.full(rows, at), self.tokens[:, at].numpy()
            steps.append((cache.decode_step(np.arange(rows), positions, ids), 1))
        for step, width in steps:
            hidden = model.hidden(weights, cache, step)[: rows * width]
            parts.append(model.logits(weights, hidden).view(rows, width, -1))
        return torch.cat(parts, 1)


def sampled_tokens(
    checkpoint: Path, weights: Mapping[str, Tensor], arch: Architecture, prompts: Sequence[str]
) -> Tokens:
    """What the policy answers when its activations are rounded, as a sampler rounds them."""
    side = Side(path=checkpoint, rounding="release")
    request = OfflineRequest(
        ours=side,
        theirs=side,
        prompts=list(prompts),
        num_samples=SAMPLES,
        max_response_tokens=RESPONSE_TOKENS,
    )
    tokenizer, generator = CheckpointTokenizer.load(checkpoint), torch.Generator().manual_seed(0)
    model, stop = Reference(weights, arch, quant=RELEASE), tokenizer.stop_token_ids
    sequences, first = [], []
    for prompt in map(tokenizer.encode, prompts):
        found = sample(model, prompt, request, generator=generator, stop=stop)
        sequences += found
        first += [len(prompt)] * len(found)
    padded = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, tokens in zip(padded, sequences, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return Tokens(sequences, first, padded)


def compared(what: str, ours: Tensor, theirs: Tensor, tokens: Tokens) -> Row:
    values = [_logprobs(logits, tokens.padded).double().numpy() for logits in (ours, theirs)]
    pairs = [
        ScoredSequence(tuple(ids), first, *(v[i, first - 1 : len(ids) - 1] for v in values))
        for i, (ids, first) in enumerate(zip(tokens.sequences, tokens.first, strict=True))
    ]
    found = compare(pairs)
    return Row(what, found.mean, found.p50, found.p99, found.max)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    following = tokens[:, 1:].unsqueeze(-1)
    return logits[:, :-1].float().log_softmax(-1).gather(-1, following).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("assets/tiny-dsv4"))
    parser.add_argument("--data", type=Path, default=Path("assets/arithmetic/heldout.jsonl"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parallel.initialise(seed=1)
    lines = given.data.read_text().splitlines()[: given.prompts]
    rows = list(measure(given.checkpoint, [json.loads(line)["problem"] for line in lines]))
    parallel.leave()
    table = Table(Column("|Δ log p|", no_wrap=True), "mean", "p50", "p99", "max", box=None)
    for row in rows:
        table.add_row(row.what, *(f"{x:.1e}" for x in (row.mean, row.p50, row.p99, row.max)))
    Console().print(table)
    if given.out is not None:
        document = {row.what: [row.mean, row.p50, row.p99, row.max] for row in rows}
        given.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
