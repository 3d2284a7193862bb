"""What a forward pass hands down to its layers and may bring back: hidden states and routes.

Names follow `shared.models.deepseek_v4.names.trace_points`; nothing is kept unless asked for.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Trace:
    """Callable tap: `x = trace("attn.q", x)`. `states` None records nothing."""

    states: dict[str, Tensor] | None = None
    prefix: str = ""

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if self.states is not None:
            self.states[self.prefix + name] = value.detach()
        return value

    def at(self, prefix: str) -> "Trace":
        return self if self.states is None else Trace(self.states, prefix)


@dataclass(slots=True)
class Routes:
    """Expert choices by layer, `[T, k]` int64: `replay` is obeyed, `record` filled if not None."""

    replay: dict[int, Tensor] = field(default_factory=dict)
    record: dict[int, Tensor] | None = None
