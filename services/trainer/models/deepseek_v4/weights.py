"""Release tensors into the actor and back, by name; both directions walk one table.

The table is the actor's column of `names`: mostly the release's names, but hyper-connections are
modules and the routed experts of a layer are stacked in two tensors.
A rank may hold a part of a tensor only: `Held` says which.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import Place, inverse, places


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


def held_tensors(model: nn.Module, *, arch: Architecture | None = None) -> Iterator[Held]:
    """Everything this rank holds, in the order of its modules; `arch` is the model's own."""
    names = _release_names(_architecture(model) if arch is None else arch)
    for name, tensor, dim in _stored(model):
        release_name = names.get(Place(name))
        if release_name is None:
            yield from _experts(name, tensor, names)
        elif dim is None:
            yield Held(release_name, tensor)
        else:
            rank = parallel_state.get_tensor_model_parallel_rank()
            count = parallel_state.get_tensor_model_parallel_world_size()
            yield Held(release_name, tensor, dim, rank, count)


def _architecture(model: nn.Module) -> Architecture:
    found: object = model.architecture
    assert isinstance(found, Architecture), found
    return found


@functools.cache
def _release_names(arch: Architecture) -> dict[Place, str]:
    return inverse(places(arch, "megatron"))


def _experts(name: str, tensor: Tensor, names: Mapping[Place, str]) -> Iterator[Held]:
    """Experts of this rank; each is cut along its inner width."""
    first = parallel_state.get_expert_model_parallel_rank() * tensor.size(0)
    rank = parallel_state.get_expert_tensor_parallel_rank()
    count = parallel_state.get_expert_tensor_parallel_world_size()
    for expert, one in enumerate(tensor, start=first):
        if one.dim() == 2:
            yield Held(names[Place(name, expert)], one, 1, rank, count)
            continue
        for row, matrix in enumerate(one):
            yield Held(names[Place(name, expert, row)], matrix, 0, rank, count)


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
