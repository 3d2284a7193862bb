"""What a forward pass hands down to its layers and may bring back: hidden states and routes.

Names are those of `shared.models.deepseek_v4.names.trace_points`; nothing is kept unless asked for.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class StateSink(Protocol):
    """What takes the states: a dictionary, or whatever passes them on."""

    def __setitem__(self, name: str, value: Tensor, /) -> None: ...


@dataclass(slots=True)
class Trace:
    """Hidden states by name, batch rows first; `states` None records nothing.

    Each method returns its value, so that a tap can stand in the middle of an expression.
    """

    states: StateSink | None = None
    prefix: str = ""
    rows: int = 1

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """A value that has its batch rows first already."""
        if self.states is not None:
            self.states[self.prefix + name] = value.detach().clone()
        return value

    def flat(self, name: str, value: Tensor) -> Tensor:
        """A value of flat tokens, `[B · S, …]`."""
        if self.states is not None:
            self(name, value.unflatten(0, (self.rows, -1)))
        return value

    def under(self, prefix: str, *, rows: int) -> "Trace":
        return self if self.states is None else Trace(self.states, self.prefix + prefix, rows)


@dataclass(slots=True)
class Routes:
    """Discrete choices by layer. What is given is obeyed; `record` is filled if not None.

    Experts are `[T, k]` int64. Entries of layers with an indexer are `[B, S, W]` bool with
    W = S // ratio: which a query may use, those not visible to it left out in any case.
    """

    replay: dict[int, Tensor] = field(default_factory=dict)
    record: dict[int, Tensor] | None = None
    entries: dict[int, Tensor] = field(default_factory=dict)
    slabs: tuple[dict[int, Tensor], ...] = ()  # entries of each of several slabs

    def of_slab(self, number: int) -> "Routes":
        """What the attention of one slab obeys."""
        return Routes(entries=self.slabs[number]) if self.slabs else self
