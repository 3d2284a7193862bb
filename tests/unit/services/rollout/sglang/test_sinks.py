"""Copies of attention sinks are written where they lie, whatever mode they were made in.

The stand-ins keep copies as SGLang 0.5.17 and 0.5.23 do, and are loaded into by name.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.rollout.engine.sglang import sinks
from services.rollout.engine.sglang.launch import GPU_PACKAGE
from services.rollout.engine.sglang.spec import SINKS_DEPARTURE

HEADS, WIDTH = 8, 64


class Layer(nn.Module):
    """One rank's attention layer; `width` of its copy may be chosen by the first who asks."""

    def __init__(self, rank: int, ranks: int = 2) -> None:
        super().__init__()
        self.attn_sink = nn.Parameter(torch.randn(HEADS))
        self._attn_sink_local: Tensor | None = None
        self.rank, self.ranks = rank, ranks

    def _local_attn_sink(self, width: int = WIDTH) -> Tensor:
        if self.ranks == 1:
            return self.attn_sink
        if self._attn_sink_local is None:
            self._attn_sink_local = self.attn_sink.new_zeros(width)
            self._attn_sink_local[: HEADS // self.ranks] = self.own
        return self._attn_sink_local[:width]

    @property
    def own(self) -> Tensor:
        return self.attn_sink.chunk(self.ranks)[self.rank]

    def forward(self, x: Tensor, width: int = WIDTH) -> Tensor:
        return x + self._local_attn_sink(width)[: HEADS // self.ranks]


class Model(nn.Module):
    """What SGLang's class does with what it is given, and not with the copies."""

    ends_in_post_load = True  # as of every version that there is

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(rank) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
        if self.ends_in_post_load:
            self.post_load_weights(is_nextn=is_nextn)

    def post_load_weights(self, is_nextn: bool = False) -> None:
        """Derives whatever else there is."""


def other_sinks(model: nn.Module) -> list[tuple[str, Tensor]]:
    named = dict(model.named_parameters())
    return [(name, one + 0.01) for name, one in named.items() if name.endswith("attn_sink")]


def run(model: Any, mode: Any = torch.inference_mode, *, width: int = WIDTH) -> list[Tensor]:
    """A forward of each layer; the copies that it attended with, as a graph would hold them."""
    with mode():
        for layer in model.layers:
            layer(torch.zeros(HEADS // 2), width)
    return [layer._attn_sink_local for layer in model.layers]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
@pytest.mark.parametrize("rank", [0, 1])
def test_copies_are_written_at_the_address_that_was_captured(
    mode: Any, width: int, rank: int
) -> None:
    model = Model(rank)
    captured = run(model, mode, width=width)
    addresses = [one.data_ptr() for one in captured]
    model.load_weights(other_sinks(model))
    assert sinks.departure(model) == pytest.approx(0.01, abs=1e-6)
    sinks.refresh(model)
    assert sinks.departure(model) == 0
    for layer, one, address in zip(model.layers, captured, addresses, strict=True):
        assert layer._attn_sink_local is one
        assert one.data_ptr() == address
        assert one.tolist() == [*layer.own.tolist(), *[0.0] * (width - HEADS // 2)]  # type: ignore[union-attr, operator]


def test_a_model_without_copies_is_left_alone() -> None:
    model = Model()
    sinks.refresh(model)
    assert [layer._attn_sink_local for layer in model.layers] == [None] * 3
    sinks.refresh(nn.Linear(2, 2))
    assert sinks.departure(model) == sinks.departure(nn.Linear(2, 2)) == 0


def test_a_copy_that_the_layer_would_not_make_is_named() -> None:
    """As of a mode in which it has other heads for a while: what it attends with is unknown."""
    model = Model()
    run(model)
    model.layers[1].ranks = 1
    with pytest.raises(RuntimeError, match=r"layers\.1 keeps a copy of 64 .* sinks, makes none"):
        sinks.refresh(model)
    assert len(model.layers[1]._attn_sink_local) == WIDTH  # type: ignore[arg-type]
    model = Model()
    run(model, width=8)
    with pytest.raises(RuntimeError, match="a copy of 8 attention sinks, makes one of 64"):
        sinks.departure(model)


@pytest.fixture
def our_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """Over the stand-in, found as SGLang finds it: by the package's modules and `EntryClass`."""
    for name in ("sglang", "sglang.srt", "sglang.srt.models", "sglang.srt.models.deepseek_v4"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.models.deepseek_v4"].DeepseekV4ForCausalLM = Model  # type: ignore[attr-defined]
    yield importlib.import_module(f"{GPU_PACKAGE}.deepseek_v4").EntryClass
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith(GPU_PACKAGE)]:
        del sys.modules[name]


@pytest.mark.parametrize("ends_in_post_load", [True, False])
def test_each_load_refreshes_what_a_graph_reads(
    our_class: type[Any], ends_in_post_load: bool
) -> None:
    """From disk, of tensors and through a group alike: SGLang calls `load_weights` for all, once
    for each bucket; an empty session calls `post_load_weights`."""
    model = our_class()
    model.ends_in_post_load = ends_in_post_load
    captured = run(model)
    named = other_sinks(model)
    for bucket in (named[:1], named[1:]):
        model.load_weights(iter(bucket))
        assert model.get_weights_by_name(SINKS_DEPARTURE, 100, tp_size=2) == [0.0]
    model.layers[0].attn_sink.data += 1
    assert model.get_weights_by_name(SINKS_DEPARTURE) == [pytest.approx(1)]
    model.post_load_weights()
    assert model.get_weights_by_name(SINKS_DEPARTURE) == [0.0]
    for layer, one in zip(model.layers, captured, strict=True):
        assert torch.equal(one[: HEADS // 2], layer.own)


def test_our_class_takes_the_place_of_its_namesake_alone(our_class: type[Any]) -> None:
    assert our_class.__name__ == "DeepseekV4ForCausalLM"
    assert issubclass(our_class, Model)
    with pytest.raises(ValueError, match="lm_head"):
        our_class().get_weights_by_name("lm_head")


def test_a_class_that_cannot_be_imported_is_an_error_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang would pass over a module of it without a word."""
    monkeypatch.setitem(sys.modules, "sglang", None)
    _forget()
    with pytest.raises(ImportError):
        importlib.import_module(GPU_PACKAGE)
