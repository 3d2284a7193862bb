"""Inner states of an engine on request: what is asked, what is answered, how both are bounded.

`POST /v1/trace` of sampler and trainer takes a packed `TraceRequest` and gives a packed `Traced`.
Arrays are raw little-endian bytes. The states of a large model are large: `layers` and `points` ask
for some of them, and an answer beyond `MAX_STATE_BYTES` is refused, not cut.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shared.arrays import Int32
from shared.messages import Message
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.walk import States

MAX_TRACE_TOKENS = 512  # of one sequence
MAX_TRACE_SEQUENCES = 64
MAX_STATE_BYTES = 256 * 2**20
MAX_BODY_BYTES = MAX_STATE_BYTES + 2**20
MEDIA_TYPE = "application/msgpack"
BINARY = {"schema": {"type": "string", "format": "binary"}}
TRACE_BODY = {
    "requestBody": {
        "required": True,
        "description": "a msgpack `TraceRequest`",
        "content": {MEDIA_TYPE: BINARY},
    }
}
"""`openapi_extra` of a route that takes one."""

TraceRounding = Literal["own", "none", "sampler"]
"""How the trainer computes: as it trains, in its own precision, or with the weights and activations
rounded as its sampler rounds them. A sampler has one way only."""

_DTYPES = ("<f4", "<f8", "|b1")


class StateArray(Message):
    """One array. Example: {"dtype": "<f4", "shape": [64, 4, 128], "data": …}."""

    dtype: Literal["<f4", "<f8", "|b1"]
    shape: list[int]
    data: bytes

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")
        expected = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if len(self.data) != expected:
            raise ValueError(f"{len(self.data)} bytes for {self.dtype}{self.shape}: {expected} fit")
        return self

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        if values.dtype.str not in _DTYPES:
            values = values.astype("<f4")
        data = np.ascontiguousarray(values).tobytes()
        return cls.model_validate(
            {"dtype": values.dtype.str, "shape": list(values.shape), "data": data}
        )

    @property
    def values(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class TraceRequest(Message):
    """The states of some sequences. With `streams` every layer asked for is given the streams of
    another side (by the names `embed` and `layers.N.hc_ffn.merge`) instead of its predecessor's."""

    max_bytes: ClassVar[int] = MAX_BODY_BYTES

    sequences: list[Int32] = Field(min_length=1, max_length=MAX_TRACE_SEQUENCES)
    policy_version: int | None = Field(None, description="refuse to trace any other")
    layers: tuple[int, int] | None = Field(None, description="first, and one past the last")
    points: list[str] | None = Field(
        None, description="as 'router' in every layer, or one as 'layers.2.router'"
    )
    rounding: TraceRounding = "own"
    streams: list[dict[str, StateArray]] | None = None
    timeout_s: float = Field(60.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        for i, tokens in enumerate(self.sequences):
            if not 2 <= len(tokens) <= MAX_TRACE_TOKENS:
                allowed = f"2 to {MAX_TRACE_TOKENS}"
                raise ValueError(f"sequence {i} has {len(tokens)} tokens, allowed are {allowed}")
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers {list(self.layers)} are none")
        if self.streams is not None and len(self.streams) != len(self.sequences):
            raise ValueError(f"{len(self.streams)} streams for {len(self.sequences)} sequences")
        return self

    def check(self, arch: Architecture) -> None:
        """ValueError for a token or a layer that the model does not have."""
        for i, tokens in enumerate(self.sequences):
            for bad in (int(tokens.min()), int(tokens.max())):
                if not 0 <= bad < arch.vocab_size:
                    raise ValueError(
                        f"sequence {i}: token id {bad} is outside the vocabulary of "
                        f"{arch.vocab_size}"
                    )
        if self.layers is not None and self.layers[1] > arch.num_hidden_layers:
            raise ValueError(f"layers {list(self.layers)} of a model with {arch.num_hidden_layers}")


class Traced(Message):
    """Of each sequence, states by the names of `names.trace_points`, one row a token."""

    max_bytes: ClassVar[int] = MAX_BODY_BYTES

    policy_version: int
    states: list[dict[str, StateArray]]


def arrays(states: Mapping[str, StateArray]) -> States:
    """What `walk` compares."""
    return {name: state.values for name, state in states.items()}


class Recorder:
    """Takes the states that are asked for, sequence by sequence, cut to its tokens; ValueError once
    they are too many."""

    def __init__(
        self,
        request: TraceRequest,
        arch: Architecture,
        to_numpy: Callable[[Any], np.ndarray] = np.asarray,
    ) -> None:
        self._request, self._arch, self._to_numpy = request, arch, to_numpy
        self._num_bytes = 0
        self.states: list[dict[str, StateArray]] = []

    def begin_sequence(self) -> None:
        """What is recorded from here on is of the next sequence."""
        self.states.append({})

    def __call__(self, name: str, value: Any) -> None:
        if not self._is_wanted(name):
            return
        state = StateArray.of(self._cut(name, self._to_numpy(value)))
        self._num_bytes += len(state.data)
        if self._num_bytes > MAX_STATE_BYTES:
            raise ValueError(
                f"the states exceed {MAX_STATE_BYTES} bytes at {name}: ask for fewer tokens, "
                "layers or points"
            )
        self.states[-1][name] = state

    def _is_wanted(self, name: str) -> bool:
        layer, part = split_point(name)
        points, layers = self._request.points, self._request.layers
        if points is not None and part not in points and name not in points:
            return False
        first, end = layers or (0, self._arch.num_hidden_layers)
        if layer is not None:
            return first <= layer < end
        # Of the points outside, those that the layers asked for begin or end with.
        return first == 0 if part == "embed" else end == self._arch.num_hidden_layers

    def _cut(self, name: str, value: np.ndarray) -> np.ndarray:
        """Without rows that pad the batch; one sequence has no batch dimension."""
        layer, part = split_point(name)
        tokens = len(self._request.sequences[len(self.states) - 1])
        if part in ("attn.compressor", "attn.indexer", "attn.indexer.scores"):
            assert layer is not None
            entries = tokens // self._arch.compress_ratios[layer]
            if part != "attn.compressor":
                return value.reshape(-1, value.shape[-2], value.shape[-1])[0, :tokens, :entries]
            return value.reshape(-1, value.shape[-1])[:entries]
        return value[:tokens]


def split_point(name: str) -> tuple[int | None, str]:
    """`layers.2.attn.q` -> (2, 'attn.q'); a point outside of the layers has none."""
    if not name.startswith("layers."):
        return None, name
    _, layer, part = name.split(".", 2)
    return int(layer), part


def stream_name(layer: int) -> str:
    """The streams that enter `layer`, which are those that leave the one before."""
    return "embed" if layer == 0 else f"layers.{layer - 1}.hc_ffn.merge"
