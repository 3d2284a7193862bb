"""How many parameters a rank holds, by how they are stored, trained and spread."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Literal, Self

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import weight_shapes
from shared.parallel import Layout
from shared.quant.policy import weight_class

Spread = Literal["whole", "tensor", "expert"]
_BLOCK = re.compile(r"^(layers|mtp)\.(\d+)\.")
# Over the tensor-parallel ranks: heads, output groups, shared experts and the vocabulary.
_TENSOR = re.compile(r"attn\.(wq_b|wo_a|wo_b)\.|attn_sink$|shared_experts\.|^(embed|head)\.")
_INDEXER = re.compile(r"^attn\.indexer\.")
INT64_BYTES = 8
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements on one rank. Dense and expert ones are trained; each of them may be FP32 by the
    release ("exact"); frozen ones have neither gradient nor optimiser state."""

    dense: int = 0
    dense_exact: int = 0
    experts: int = 0
    frozen: int = 0
    frozen_exact: int = 0
    table_entries: int = 0
    """Of `tid2eid`, int64, no parameters."""

    def __add__(self, other: Self) -> "Parameters":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Parameters(*(a + b for a, b in pairs))

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.frozen_exact

    @property
    def trained(self) -> int:
        return self.dense + self.dense_exact + self.experts

    def weight_bytes(self, dtype_bytes: int) -> int:
        exact = self.dense_exact + self.frozen_exact
        return (
            (self.total - exact) * dtype_bytes
            + exact * FP32_BYTES
            + self.table_entries * INT64_BYTES
        )


def stage_parameters(
    arch: Architecture,
    layout: Layout,
    *,
    stage: int,
    freeze_router: bool,
    trains_mtp: bool = False,
) -> Parameters:
    """What each rank of pipeline stage `stage` holds.

    MTP blocks are the last stage's; where they are trained it has a copy of the embedding, too.
    """
    layers = layout.stage_layers(arch.num_hidden_layers)[stage]
    keys = [f"layers.{layer}" for layer in layers]
    if stage == 0:
        keys.append("first")
    if stage == layout.pipeline - 1:
        keys += ["last", *(f"mtp.{depth}" for depth in range(arch.num_nextn_predict_layers))]
    counts: Counter[_Kind] = sum((_counts(arch)[key] for key in keys), Counter())
    total = Parameters()
    for kind, number in counts.items():
        total += _on_rank(kind, number, layout, freeze_router=freeze_router, trains_mtp=trains_mtp)
    if trains_mtp and 0 < stage == layout.pipeline - 1:
        total += Parameters(frozen=arch.vocab_size * arch.hidden_size // layout.tensor)
    return total


@dataclass(frozen=True, slots=True)
class _Kind:
    spread: Spread
    storage: Literal["plain", "exact", "table"]
    role: Literal["trained", "router", "mtp", "mtp router", "frozen"]


@lru_cache(maxsize=8)
def _counts(arch: Architecture) -> dict[str, Counter[_Kind]]:
    """Elements of the whole model, by block (or `first`, `last`) and kind."""
    found: dict[str, Counter[_Kind]] = {"first": Counter(), "last": Counter()}
    for key, kind, number in _kinds(arch):
        found.setdefault(key, Counter())[kind] += number
    return found


def _kinds(arch: Architecture) -> Iterator[tuple[str, _Kind, int]]:
    for name, shape in weight_shapes(arch).items():
        block = _BLOCK.match(name)
        tail = name[block.end() :] if block else name
        key = block[0].rstrip(".") if block else "first" if tail == "embed.weight" else "last"
        yield key, _kind(name, tail, is_mtp=key.startswith("mtp")), prod(shape)


def _kind(name: str, tail: str, *, is_mtp: bool) -> _Kind:
    weight = weight_class(name)
    spread: Spread = (
        "expert" if weight == "expert" else "tensor" if _TENSOR.search(tail) else "whole"
    )
    if weight == "table":
        return _Kind(spread, "table", "frozen")
    storage: Literal["plain", "exact"] = "exact" if weight == "exact" else "plain"
    if _INDEXER.match(tail) or tail == "ffn.gate.bias":
        return _Kind(spread, storage, "frozen")
    if tail == "ffn.gate.weight":
        return _Kind(spread, storage, "mtp router" if is_mtp else "router")
    return _Kind(spread, storage, "mtp" if is_mtp else "trained")


def _on_rank(
    kind: _Kind, number: int, layout: Layout, *, freeze_router: bool, trains_mtp: bool
) -> Parameters:
    ranks = {
        "whole": 1,
        "tensor": layout.tensor,
        "expert": layout.expert * layout.expert_tensor,
    }
    here = number // ranks[kind.spread]
    if kind.storage == "table":
        return Parameters(table_entries=here)
    is_frozen = (
        kind.role == "frozen"
        or ("router" in kind.role and freeze_router)
        or ("mtp" in kind.role and not trains_mtp)
    )
    if is_frozen:
        return Parameters(frozen_exact=here) if kind.storage == "exact" else Parameters(frozen=here)
    if kind.spread == "expert":
        return Parameters(experts=here)
    return Parameters(dense_exact=here) if kind.storage == "exact" else Parameters(dense=here)
