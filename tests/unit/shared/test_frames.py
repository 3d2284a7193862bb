"""Frames round trip, and broken ones are named."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ChannelClosed, Rejected, RemoteError, Retryable
from shared.frames import (
    HEADER,
    body_length,
    error_fields,
    error_from,
    pack_frame,
    unpack_frame,
)

leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
values = st.recursive(
    leaves | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), values))
def test_frames_round_trip(payload):
    header, body = pack_frame({"id": 1, "payload": payload})
    assert body_length(header) == len(body)
    assert unpack_frame(body) == {"id": 1, "payload": payload}


def test_frame_beyond_the_bound_is_refused_by_both():
    with pytest.raises(ValueError, match="exceeds 10"):
        pack_frame({"x": bytes(100)}, max_bytes=10)
    with pytest.raises(ChannelClosed, match="a frame of 11 bytes; at most 10"):
        body_length(HEADER.pack(11), max_bytes=10)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa1a", bytes(9)])
def test_garbage_is_a_closed_channel(body):
    with pytest.raises(ChannelClosed, match="not msgpack"):
        unpack_frame(body)


@pytest.mark.parametrize("error", [Rejected("no"), Retryable("later"), ValueError("odd")])
def test_known_errors_keep_their_class(error):
    again = error_from(error_fields(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_unknown_errors_keep_their_name():
    again = error_from(error_fields(ZeroDivisionError("by zero")))
    assert isinstance(again, RemoteError)
    assert str(again) == "ZeroDivisionError: by zero"
