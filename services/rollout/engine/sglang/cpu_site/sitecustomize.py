"""Python reads this at its start where it is first on PYTHONPATH: SGLang without a GPU.

SGLang's CPU build wants kernels that no wheel of it has, and a torchvision whose compiled part fits
torch. Neither is used by a text model served with torch's own attention, so what is asked for at
import time is given here, after the module in question was loaded. Nothing else changes.
"""

import importlib.abc
import importlib.util
import sys


def _name_vision_operators(_):
    """torchvision registers fake versions of operators that its compiled part would define."""
    import torch

    for schema in ("nms", "qnms"):
        name = f"torchvision::{schema}"
        if not hasattr(torch.ops.torchvision, schema):
            torch.library.define(
                name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def _plain_rotary(module):
    """Plain rotary embedding has no CPU kernel; the portable class computes the same."""
    fused = module.get_rope_cpu

    def get_rope_cpu(*args, **kwargs):
        scaling = kwargs.get("rope_scaling", args[5] if len(args) > 5 else None)
        if scaling is not None:
            return fused(*args, **kwargs)
        kwargs.pop("device", None)
        return module.get_rope(*args[:8], **kwargs)

    module.get_rope_cpu = get_rope_cpu


def _unpinned_pool(module):
    """Host memory is registered with CUDA even where the device is the CPU."""
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **kwargs: None)


def _loading_on_cpu(module):
    """One dialect's post-processing asks CUDA for its current device."""
    import contextlib

    import torch

    torch.cuda.current_device = lambda: 0
    module.device_loading_context = lambda *args: contextlib.nullcontext()


_BEFORE = {"torchvision": _name_vision_operators}
_AFTER = {
    "sglang.srt.layers.rotary_embedding.factory": _plain_rotary,
    "sglang.srt.mem_cache.pool_host.common": _unpinned_pool,
    "sglang.srt.model_loader.loader": _loading_on_cpu,
}


class _Patches(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and wraps what they found."""

    def __init__(self):
        self._asking = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self._asking or fullname not in (_BEFORE.keys() | _AFTER.keys()):
            return None
        self._asking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _patched(fullname, spec.loader.exec_module)
        return spec


def _patched(fullname, load):
    def exec_module(module):
        if fullname in _BEFORE:
            _BEFORE[fullname](module)
        load(module)
        if fullname in _AFTER:
            _AFTER[fullname](module)

    return exec_module


sys.meta_path.insert(0, _Patches())
