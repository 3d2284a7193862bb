"""The attention sinks that a server keeps a second time: how they are made anew, and checked.

At tensor parallel above 1 SGLang's DeepSeek-V4 attends with a padded copy of each rank's sinks,
`_attn_sink_local`, made at the first forward. Before 0.5.23 no update refreshes it (the fix:
https://github.com/sgl-project/sglang/pull/29916), no checksum covers it, and CUDA graphs read its
address. So it is written in place, after every load; torch alone, no SGLang, is needed for that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_COPY = "_attn_sink_local"


@torch.inference_mode()  # the copies were made in it, and a normal tensor may be written in it, too
def refresh(model: nn.Module) -> None:
    """Write each layer's sinks into its copy, at the address that it has.

    A model without copies, or before its first forward, is left alone. RuntimeError when a layer
    does not make a copy of the kind that it keeps.
    """
    for kept, anew in _pairs(model):
        kept.copy_(anew)


@torch.inference_mode()
def departure(model: nn.Module) -> float:
    """The largest |copy - sink| of this rank; 0 where there are no copies."""
    return max((float((kept - anew).abs().max()) for kept, anew in _pairs(model)), default=0.0)


def _pairs(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each layer's copy, and what the layer itself would make of its sinks now."""
    for name, layer in model.named_modules():
        kept = getattr(layer, _COPY, None)
        if kept is None:
            continue
        setattr(layer, _COPY, None)
        try:
            layer._local_attn_sink()
            anew = getattr(layer, _COPY)
        finally:
            setattr(layer, _COPY, kept)
        if anew is None or len(anew) > len(kept):
            found = "none" if anew is None else f"one of {len(anew)}"
            raise RuntimeError(f"{name} keeps a copy of {len(kept)} attention sinks, makes {found}")
        yield kept[: len(anew)], anew  # newer layers may have kept a wider one
