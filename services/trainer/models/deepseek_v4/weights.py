"""Release tensors into the actor and back, by name; both directions walk one table.

The actor's parameter names are the release's, except that hyper-connections are modules
(`hc_attn.fn` for `hc_attn_fn`) and the routed experts of a layer are stacked in two tensors.
A rank may hold a part of a tensor only: `Held` says which.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

_HYPER_CONNECTION = re.compile(r"\b(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$")
_STACKED = re.compile(r"^(.*\.ffn\.experts)\.(w13|w2)$")


@dataclass(frozen=True, slots=True)
class Held:
    """The `index`-th of `count` equal parts, along `dim`, of the release tensor `name`.

    `tensor` is a view of the actor's own storage.
    """

    name: str
    tensor: Tensor
    dim: int = 0
    index: int = 0
    count: int = 1

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor."""
        shape = list(self.tensor.shape)
        if self.count > 1:
            shape[self.dim] *= self.count
        return shape

    @property
    def is_expert(self) -> bool:
        return ".ffn.experts." in self.name

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor."""
        if self.count == 1:
            return whole
        length = self.tensor.size(self.dim)
        return whole.narrow(self.dim, self.index * length, length)


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy release tensors (already dequantised) into `model`, casting to each parameter's dtype.

    Every tensor of which this rank holds something must be there, whole; others are ignored,
    because other ranks hold them. Raises ValueError naming the tensor, expected and found.
    """
    for held in held_tensors(model):
        name, target = held.name, held.tensor
        if name not in weights:
            raise ValueError(f"{name}: expected a tensor of shape {held.shape}, found none")
        source = weights[name]
        if list(source.shape) != held.shape:
            raise ValueError(f"{name}: expected shape {held.shape}, found {list(source.shape)}")
        if source.is_floating_point() != target.is_floating_point():
            raise ValueError(f"{name}: expected {target.dtype}, found {source.dtype}")
        target.copy_(held.of(source))


def release_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(release name, view of the actor's own storage) of everything this rank holds."""
    for held in held_tensors(model):
        yield held.name, held.tensor


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Everything this rank holds, in the order of its modules."""
    for name, tensor, dim in _stored(model):
        stacked = _STACKED.match(name)
        if stacked is not None:
            yield from _experts(tensor, *stacked.groups())
        elif dim is None:
            yield Held(_HYPER_CONNECTION.sub(r"\1_\2", name), tensor)
        else:
            rank = parallel_state.get_tensor_model_parallel_rank()
            count = parallel_state.get_tensor_model_parallel_world_size()
            yield Held(name, tensor, dim, rank, count)


def _experts(tensor: Tensor, prefix: str, which: str) -> Iterator[Held]:
    """Experts of this rank; each is cut along its inner width."""
    first = parallel_state.get_expert_model_parallel_rank() * tensor.size(0)
    rank = parallel_state.get_expert_tensor_parallel_rank()
    count = parallel_state.get_expert_tensor_parallel_world_size()
    for expert, one in enumerate(tensor, start=first):
        if which == "w2":
            yield Held(f"{prefix}.{expert}.w2.weight", one, 1, rank, count)
        else:
            yield Held(f"{prefix}.{expert}.w1.weight", one[0], 0, rank, count)
            yield Held(f"{prefix}.{expert}.w3.weight", one[1], 0, rank, count)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor, int | None]]:
    """Parameters and persistent tables, detached, by module name; and the dimension along which
    tensor-parallel ranks share them."""
    parameter: Any
    for name, parameter in model.named_parameters():
        is_split = getattr(parameter, "tensor_model_parallel", False)
        yield name, parameter.detach(), parameter.partition_dim if is_split else None
    for name, buffer in model.named_buffers():
        if name.endswith(".tid2eid"):
            yield name, buffer, None
