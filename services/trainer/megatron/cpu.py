"""Lets Megatron-core run on CPU tensors and gloo, without an edit to Megatron.

Megatron asks CUDA for devices, streams and generators where no GPU is needed; `install` has the CPU
answer. Only tensor factories are wrapped, because anything wider costs time on every operation.
"""

import contextlib
import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def needed() -> bool:
    return not torch.cuda.is_available()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return _CPU if needed() else torch.device("cuda", torch.cuda.current_device())


def install() -> None:
    """Answer Megatron's questions to CUDA with the CPU; safe to call twice, nothing with a GPU."""
    if not needed() or getattr(torch.cuda, "Stream", None) is _Stream:
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _nothing)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *a, **k: 0
    tensor: Any = torch.Tensor
    tensor.type = _typename(tensor.type)
    tensor.cuda = torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    # torch keeps a set of its factories for `with torch.device(...)`: filled now, it has the real
    # ones, which ours call; filled later it would have ours, and miss every call.
    _device_constructors()
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, _redirected(getattr(torch, name)))
    _patch_megatron()


def _patch_megatron() -> None:
    import torch.cuda.nvtx as nvtx
    from megatron.core.tensor_parallel import random as megatron_random

    nvtx.range_push = nvtx.range_pop = _nothing
    megatron_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()


def _redirected(factory: Any) -> Any:
    """A tensor factory that makes CPU tensors when asked for CUDA ones."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _typename(original: Any) -> Any:
    """Megatron compares `tensor.type()` with CUDA type names to find a parameter's dtype."""

    def typename(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return "torch.cuda." + original(self).rsplit(".", 1)[1]

    return typename


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Stream:
    """Stands for streams and events: everything has already happened on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _nothing

    def record_event(self, *args: Any) -> "_Stream":
        return self

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None: ...
