"""Release tensors into the actor and back, by name; both directions walk one table.

The actor's parameter names are the release's, except that hyper-connections are modules
(`hc_attn.fn` for `hc_attn_fn`) and the routed experts of a layer are stacked in two tensors.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

_HYPER_CONNECTION = re.compile(r"\b(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$")
_STACKED = re.compile(r"^(.*\.ffn\.experts)\.(w13|w2)$")


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy release tensors (already dequantised) into `model`, casting to each parameter's dtype.

    Every tensor that this stage holds must be there with its shape; others are ignored, because
    other stages hold them. Raises ValueError naming the tensor, expected and found.
    """
    for name, target in release_tensors(model):
        if name not in weights:
            raise ValueError(f"{name}: expected a tensor of shape {list(target.shape)}, found none")
        source = weights[name]
        if source.shape != target.shape:
            raise ValueError(
                f"{name}: expected shape {list(target.shape)}, found {list(source.shape)}"
            )
        if source.is_floating_point() != target.is_floating_point():
            raise ValueError(f"{name}: expected {target.dtype}, found {source.dtype}")
        target.copy_(source)


def release_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(release name, view of the actor's own storage) of everything this stage holds."""
    for name, tensor in _stored(model):
        stacked = _STACKED.match(name)
        if stacked is None:
            yield _HYPER_CONNECTION.sub(r"\1_\2", name), tensor
            continue
        prefix, which = stacked.groups()
        for expert in range(tensor.size(0)):
            if which == "w2":
                yield f"{prefix}.{expert}.w2.weight", tensor[expert]
            else:
                yield f"{prefix}.{expert}.w1.weight", tensor[expert, 0]
                yield f"{prefix}.{expert}.w3.weight", tensor[expert, 1]


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent tables, detached, by module name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for name, buffer in model.named_buffers():
        if name.endswith(".tid2eid"):
            yield name, buffer
