"""Releases with the real head dimensions, small enough for one GPU, and pairs to warm them up on.

`python -m tests.gpu.releases FOLDER [A B narrow]` makes FOLDER/A and FOLDER/B, which differ in
every weight, FOLDER/narrow with fewer experts, and FOLDER/pairs.jsonl: the demo's sums, worked out.
configs/gpu-single.toml trains `narrow`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scripts.arithmetic import split
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import write_release
from shared.models.deepseek_v4.names import weight_shapes
from tests.tiny_deepseek_v4 import FLASH, random_weight

SINGLE = replace(
    FLASH.with_format("fp8"),
    vocab_size=4096,
    num_hidden_layers=4,
    num_nextn_predict_layers=0,
    compress_ratios=(0, 4, 128, 4),
    moe_intermediate_size=256,
    num_hash_layers=1,
    max_position_embeddings=65536,
)
"""Real hidden size, heads and number of experts; narrow experts, so that one GPU trains it."""

NARROW = replace(SINGLE, n_routed_experts=64)
"""A quarter of the experts: a hundred steps, an update each, fit into minutes of one GPU."""

ARCHITECTURES = {"A": SINGLE, "B": SINGLE, "narrow": NARROW}

SINKS = {"A": 4.0, "B": 4.0}
"""Spread of the attention sinks, 1 elsewhere: the sinks of A in B then move log-probabilities by
0.01, which is seen over what a server differs by from itself."""

NUM_PAIRS, NUM_HELDOUT = 4000, 128


def write_random_release(
    folder: Path, arch: Architecture, *, seed: int = 0, sinks: float = 1.0
) -> None:
    """Made and quantised on the device, one tensor at a time; with the demo's tokenizer."""
    weights = _RandomWeights(arch, seed, sinks)
    write_release(folder, arch, weights, shard_bytes=2**30, tokenizer_from="assets/tiny-dsv4")


def releases(folder: Path, names: Sequence[str] = ("A", "B")) -> dict[str, Path]:
    """Made where they are missing; the name is the seed, too."""
    found = {name: folder / name for name in names}
    for name, path in found.items():
        if not path.exists():
            sinks = SINKS.get(name, 1.0)
            write_random_release(path, ARCHITECTURES[name], seed=ord(name[0]), sinks=sinks)
    return found


def write_pairs(path: Path) -> None:
    """The problems that assets/arithmetic trains on, with their worked answers."""
    train, _ = split(0, num_train=NUM_PAIRS, num_heldout=NUM_HELDOUT)
    rows = ({"prompt": one.prompt, "response": one.worked} for one in train)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class _RandomWeights(Mapping[str, Tensor]):
    """Values by release name, made when they are asked for."""

    def __init__(self, arch: Architecture, seed: int, sinks: float) -> None:
        self._arch = arch
        self._sinks = sinks
        self._shapes = weight_shapes(arch)
        self._generator = torch.Generator("cuda").manual_seed(seed)

    def __getitem__(self, name: str) -> Tensor:
        drawn = random_weight(
            name, self._shapes[name], self._arch, generator=self._generator, spread=0.5
        )
        return drawn * self._sinks if name.endswith(".attn_sink") else drawn

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*ARCHITECTURES])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_pairs(given.folder / "pairs.jsonl")
    releases(given.folder, given.names)


if __name__ == "__main__":
    main()
