"""Frames on a byte stream: a length, then msgpack. Bytes stay bytes; nothing is ever unpickled."""

import struct
from typing import Any, cast

import msgpack

from shared.errors import (
    ChannelClosed,
    LeftHalfway,
    PartialModel,
    Rejected,
    RemoteError,
    Retryable,
)

MAX_FRAME_BYTES = 2**30
HEADER = struct.Struct("<I")

# A child's errors of these kinds mean the same to the parent; any other becomes a RemoteError.
_KNOWN: dict[str, type[Exception]] = {
    "Rejected": Rejected,
    "LeftHalfway": LeftHalfway,
    "Retryable": Retryable,
    "ValueError": ValueError,
    "PartialModel": PartialModel,
    "KeyError": KeyError,
    "TimeoutError": TimeoutError,
}


def pack_frame(message: dict[str, Any], max_bytes: int = MAX_FRAME_BYTES) -> tuple[bytes, bytes]:
    """Header and body; a frame beyond `max_bytes` is the sender's mistake."""
    body = cast(bytes, msgpack.packb(message))
    if len(body) > max_bytes:
        raise ValueError(f"a frame of {len(body)} bytes exceeds {max_bytes}")
    return HEADER.pack(len(body)), body


def body_length(header: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> int:
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise ChannelClosed(f"the peer announced a frame of {length} bytes; at most {max_bytes}")
    return int(length)


def unpack_frame(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as err:
        raise ChannelClosed(f"the peer sent a frame that is not msgpack: {err}") from err
    return cast(dict[str, Any], message)


def error_fields(error: BaseException) -> dict[str, str]:
    return {"kind": type(error).__name__, "text": str(error)}


def error_from(fields: dict[str, str]) -> Exception:
    known = _KNOWN.get(fields["kind"])
    return known(fields["text"]) if known else RemoteError(fields["kind"], fields["text"])
