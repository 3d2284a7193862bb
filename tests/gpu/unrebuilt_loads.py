"""What a server's load is robbed of, so that its dequantised `wo_a` is not what was published.

`copy`: codes and scales; the copy stays that of the load before, a step behind, then two.
`scales`: the scales alone; SGLang 0.5.17 then takes the codes themselves for weights
(`_dequant_fp8_wo_a_streaming`: a weight without a scale is passed on), and only casts them.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

Kind = Literal["copy", "scales"]
LEFT: dict[Kind, str] = {"copy": ".wo_a.", "scales": ".wo_a.scale"}

Value = TypeVar("Value")


def kind_of(name: str) -> Kind:
    """ValueError for another name."""
    for kind in LEFT:
        if name == kind:
            return kind
    raise ValueError(f"UNREBUILT={name}: not one of {', '.join(LEFT)}")


def without(weights: Iterable[tuple[str, Value]], kind: Kind) -> Iterator[tuple[str, Value]]:
    """`weights`, in release names, without what a load of this kind leaves out."""
    return ((name, value) for name, value in weights if LEFT[kind] not in name)
