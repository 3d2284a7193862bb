"""How an actor is spread over ranks: the arithmetic that planner, preflight and ranks share.

Ranks are numbered as Megatron numbers them, fastest first: tensor, context, data, pipeline; experts
are spread over the ranks of one pipeline stage, expert-tensor ranks first. Nothing here is a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Layout:
    """`world` ranks. Raises ValueError, with the numbers, for sizes that do not divide."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        dense = self.tensor * self.pipeline * self.context
        if self.world % dense:
            raise ValueError(
                f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} = "
                f"{dense} does not divide {self.world} ranks"
            )
        experts = self.expert * self.expert_tensor
        if self.stage_ranks % experts:
            raise ValueError(
                f"expert {self.expert} x expert_tensor {self.expert_tensor} = {experts} does not "
                f"divide the {self.stage_ranks} ranks of a pipeline stage"
            )
        if self.pipeline == 1 and (self.first_stage_layers or self.last_stage_layers):
            raise ValueError("first_stage_layers and last_stage_layers need pipeline > 1")

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold one pipeline stage."""
        return self.world // self.pipeline

    @property
    def data(self) -> int:
        """Ranks with the same dense weights and other samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks with the same experts."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_ranks

    def stage_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage: first and last as asked, the others alike."""
        asked = [self.first_stage_layers, *[None] * (self.pipeline - 2), self.last_stage_layers]
        asked = asked if self.pipeline > 1 else [None]
        left = num_layers - sum(size or 0 for size in asked)
        others = asked.count(None)
        if left < others or (left % others if others else left):
            shown = ", ".join("?" if size is None else str(size) for size in asked)
            last = balanced_last_stage(num_layers, self.pipeline)
            raise ValueError(
                f"{num_layers} layers do not make {self.pipeline} pipeline stages of [{shown}]: "
                f"{left} layers are left for {others} equal stages"
                + (f"; last_stage_layers {last} alone would leave equal ones" if last else "")
            )
        return tuple(size or left // others for size in asked)

    def stage_layers(self, num_layers: int) -> list[range]:
        """Numbers of the layers of each pipeline stage."""
        starts = [0]
        for size in self.stage_sizes(num_layers):
            starts.append(starts[-1] + size)
        return [range(*pair) for pair in pairwise(starts)]

    def __str__(self) -> str:
        """Example: TP1/PP4/EP4/DP4/LAST10."""
        parts = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert}
        parts["ETP"] = self.expert_tensor
        shown = [f"{name}{size}" for name, size in parts.items() if size > 1 or name == "TP"]
        uneven = {"FIRST": self.first_stage_layers, "LAST": self.last_stage_layers}
        stages = [f"{name}{size}" for name, size in uneven.items() if size is not None]
        return "/".join([*shown, f"DP{self.data}", *stages])


def balanced_last_stage(num_layers: int, pipeline: int) -> int | None:
    """Layers of a shorter last stage, where all cannot be equal; it also has the output head.

    None where they can, or where no shorter last stage leaves equal others.
    """
    if pipeline == 1 or num_layers % pipeline == 0:
        return None
    size = -(-num_layers // pipeline)
    last = num_layers - size * (pipeline - 1)
    return last if last > 0 else None


def divisors(number: int) -> Sequence[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
