"""What a sampler's discrete choices were, token by token, so that a trainer can make them again.

Of a sequence every token that was an input has a row: the routed experts of each layer (MTP blocks
left out), and of each layer with an indexer the entries that it kept. An expert takes one byte
(two where there are more than 256), an entry one bit; a packed sequence is compressed.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgpack
import numpy as np
import numpy.typing as npt

from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture

COMPRESSION_LEVEL = 1
_BITS: Literal["little"] = "little"  # entry w is bit w % 8 of byte w // 8


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """The choices at T tokens; what was not recorded is None."""

    expert_ids: np.ndarray | None  # uint8 or uint16 [T, layers, k], hash layers included
    entry_bits: np.ndarray | None  # uint8 [T, indexed layers, ceil(entries / 8)]

    @property
    def num_tokens(self) -> int:
        known = self.expert_ids if self.expert_ids is not None else self.entry_bits
        return 0 if known is None else len(known)


def expert_dtype(arch: Architecture) -> np.dtype[Any]:
    return np.dtype("u1" if arch.n_routed_experts <= 256 else "<u2")


def indexed_layers(arch: Architecture) -> list[int]:
    """Layers whose indexer selects, in the order in which their bits are recorded."""
    return [layer for layer in range(arch.num_hidden_layers) if arch.kind(layer) == "c4"]


def first_selecting_token(arch: Architecture) -> int:
    """Tokens before it see no more entries than the indexer keeps, and use them all."""
    return (arch.index_topk + 1) * C4_RATIO - 1


def num_entry_bytes(num_tokens: int) -> int:
    """Bytes of the bits of all entries that `num_tokens` tokens can see."""
    return -(-(num_tokens // C4_RATIO) // 8)


def pack_bits(kept: npt.NDArray[np.bool_], num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bool [..., entries] to uint8 [..., num_bytes]; further entries are not kept."""
    bits = np.packbits(kept, axis=-1, bitorder=_BITS)
    missing = num_bytes - bits.shape[-1]
    if missing <= 0:
        return bits[..., :num_bytes]
    return np.pad(bits, _at_the_end(bits, missing))


def unpack_bits(bits: npt.NDArray[np.uint8], num_entries: int) -> npt.NDArray[np.bool_]:
    """Bool [..., num_entries]; entries without a bit are not kept."""
    kept = np.unpackbits(bits, axis=-1, bitorder=_BITS)[..., :num_entries].astype(bool)
    missing = num_entries - kept.shape[-1]
    if missing <= 0:
        return kept
    return np.pad(kept, _at_the_end(kept, missing))


def pack_routes(routes: TokenRoutes) -> bytes:
    """One sequence, compressed: layer after layer, since what repeats repeats within one."""
    body = {
        "tokens": routes.num_tokens,
        "experts": _packed(routes.expert_ids),
        "entries": _packed(routes.entry_bits),
    }
    return cast(bytes, msgpack.packb(body))


def unpack_routes(
    blob: bytes, arch: Architecture, num_tokens: int, *, routing: bool, indexer: bool, of: str
) -> TokenRoutes:
    """The parts that are asked for, checked: ValueError names the sequence `of`, value and bound.

    Every token has distinct experts of the model. Every token from `first_selecting_token` on has
    exactly `index_topk` entries, all of which it can see; those before have none.
    """
    try:
        body = msgpack.unpackb(blob)
        stored, experts, entries = body["tokens"], body["experts"], body["entries"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, RecursionError) as err:
        raise ValueError(f"routes of {of}: {len(blob)} bytes that are no routes ({err!r})") from err
    if stored != num_tokens:
        raise ValueError(f"routes of {of}: they are of {stored} tokens, {num_tokens} are needed")
    expert_ids = entry_bits = None
    if routing:
        shape = (num_tokens, arch.num_hidden_layers, arch.num_experts_per_tok)
        expert_ids = _unpacked(experts, shape, expert_dtype(arch), f"expert ids of {of}")
        _check_experts(expert_ids, arch, of)
    if indexer:
        shape = (num_tokens, len(indexed_layers(arch)), num_entry_bytes(num_tokens))
        entry_bits = _unpacked(entries, shape, np.dtype("u1"), f"indexer entries of {of}")
        _check_entries(entry_bits, arch, of)
    return TokenRoutes(expert_ids, entry_bits)


def _packed(array: np.ndarray | None) -> bytes | None:
    if array is None:
        return None
    by_layer = np.moveaxis(array, 0, -1)
    return zlib.compress(by_layer.astype(array.dtype, order="C").tobytes(), COMPRESSION_LEVEL)


def _at_the_end(array: np.ndarray, missing: int) -> list[tuple[int, int]]:
    return [(0, 0)] * (array.ndim - 1) + [(0, missing)]


def _unpacked(
    body: object, shape: tuple[int, int, int], dtype: np.dtype[Any], what: str
) -> np.ndarray:
    tokens, layers, width = shape
    expected = tokens * layers * width * dtype.itemsize
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(cast(bytes, body), expected + 1)  # no more, whatever it claims
    except (TypeError, zlib.error) as err:
        raise ValueError(f"{what}: no compressed bytes ({err})") from err
    if len(raw) != expected or not inflate.eof:
        found = f"{len(raw)} bytes" if len(raw) <= expected else f"more than {expected} bytes"
        raise ValueError(f"{what}: {found}, {tokens} x {layers} x {width} values take {expected}")
    return np.moveaxis(np.frombuffer(raw, dtype).reshape(layers, width, tokens), -1, 0)


def _check_experts(ids: np.ndarray, arch: Architecture, of: str) -> None:
    if ids.size and int(ids.max()) >= arch.n_routed_experts:
        token, layer, _ = np.unravel_index(int(ids.argmax()), ids.shape)
        raise ValueError(
            f"routes of {of}: expert {int(ids.max())} at token {token}, layer {layer}; the model "
            f"has {arch.n_routed_experts}"
        )
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        token, layer = np.argwhere(twice)[0]
        raise ValueError(
            f"routes of {of}: an expert twice among {ids[token, layer].tolist()} at token {token}, "
            f"layer {layer}"
        )


def _check_entries(bits: np.ndarray, arch: Architecture, of: str) -> None:
    tokens = np.arange(len(bits))
    kept = unpack_bits(bits, 8 * bits.shape[-1])
    expected = np.where(tokens < first_selecting_token(arch), 0, arch.index_topk)
    seen = (tokens + 1) // C4_RATIO
    hidden = np.arange(kept.shape[-1]) >= seen[:, None]
    for wrong, what in (
        ((kept & hidden[:, None]).any(-1), "an entry that is not visible yet"),
        (kept.sum(-1) != expected[:, None], None),
    ):
        if wrong.any():
            token, layer = np.argwhere(wrong)[0]
            found = what or f"{int(kept[token, layer].sum())} entries, not {expected[token]},"
            where = f"at token {token}, layer {indexed_layers(arch)[layer]}"
            raise ValueError(f"routes of {of}: {found} {where} ({seen[token]} are visible)")
