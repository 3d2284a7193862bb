import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WeightsCorrupt
from shared.weights import delta as module
from shared.weights.delta import apply_delta, encode_delta, read_header

WIDTHS = [1, 2, 4, 8]


def changed(
    base: np.ndarray, share: float, *, seed: int = 0, step: int | None = None
) -> np.ndarray:
    """`base` with a share of its elements moved by ±`step`, or to any other value."""
    generator = np.random.default_rng(seed)
    at = np.flatnonzero(generator.random(len(base)) < share)
    moves = (
        generator.integers(1, 255, len(at))
        if step is None
        else generator.choice([step, -step], len(at))
    )
    new = base.copy()
    new[at] = new[at] + moves.astype(base.dtype)
    return new


def random_elements(count: int, item_bytes: int = 1, *, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, count * item_bytes, dtype=np.uint8)
    return raw.view(f"<u{item_bytes}")


def slow_apply(base: bytes, delta: bytes) -> bytes:
    """The format, read byte by byte, as its description says."""
    _, width, count, num_changed = struct.unpack_from("<BBxxxxxxQQ", delta)
    items = [base[i : i + width] for i in range(0, len(base), width)]
    assert len(items) == count
    cursor, seen = 24, 0
    for start in range(0, count, module._RUN_ITEMS):
        positions, values, changes, position_bytes, num_whole = struct.unpack_from(
            "<BBxxIII", delta, cursor
        )
        cursor += 16
        raw, cursor = delta[cursor : cursor + position_bytes], cursor + position_bytes
        at = slow_positions(raw, positions, min(module._RUN_ITEMS, count - start))
        assert len(at) == changes
        bits = [0, 4, 8, 16][values]
        step_bytes = (changes * bits + 7) // 8
        steps, cursor = delta[cursor : cursor + step_bytes], cursor + step_bytes
        whole = [delta[cursor + i * width : cursor + (i + 1) * width] for i in range(num_whole)]
        cursor += num_whole * width
        for number, place in enumerate(at):
            code = int.from_bytes(steps, "little") >> bits * number & ((1 << bits) - 1)
            old = int.from_bytes(items[start + place], "little")
            moved = ((old + code - (1 << bits >> 1)) % 256**width).to_bytes(width, "little")
            items[start + place] = moved if code else whole.pop(0)
        assert not whole
        seen += changes
    assert cursor == len(delta)
    assert seen == num_changed
    return b"".join(items)


def slow_positions(raw: bytes, form: int, count: int) -> list[int]:
    if form == 2:
        return [i for i in range(count) if raw[i // 8] >> (7 - i % 8) & 1]
    width, at, place = form + 1, [], 0
    for i in range(0, len(raw), width):
        gap = int.from_bytes(raw[i : i + width], "little")
        place += gap
        if gap != 256**width - 1:
            at.append(place)
            place += 1
    return at


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_come_back(data: Any) -> None:
    width = data.draw(st.sampled_from(WIDTHS))
    items = st.binary(min_size=width, max_size=width)
    base = data.draw(st.lists(items, max_size=600))
    new = list(base)
    for place in data.draw(st.lists(st.integers(0, max(0, len(base) - 1)), max_size=60)):
        if base:
            new[place] = data.draw(items)
    one, two = b"".join(base), b"".join(new)
    encoded = encode_delta(one, two, item_bytes=width, max_share=100)
    assert encoded is not None or not base
    if encoded is not None:
        assert bytes(apply_delta(one, encoded)) == two
        assert slow_apply(one, encoded) == two


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 5000),
    width=st.sampled_from(WIDTHS),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    step=st.sampled_from([None, 1, 7, 8, 127, 128, 32767, 32768]),
    seed=st.integers(0, 99),
)
def test_any_share_and_step_comes_back_in_runs(
    count: int, width: int, share: float, step: int | None, seed: int
) -> None:
    base = random_elements(count, width, seed=seed)
    new = changed(base, share, seed=seed, step=step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RUN_ITEMS", 700)
        encoded = encode_delta(base, new, item_bytes=width, max_share=100)
        assert encoded is not None
        assert np.array_equal(apply_delta(base, encoded).view(base.dtype), new)
        assert slow_apply(base.tobytes(), encoded) == new.tobytes()
    assert read_header(encoded).num_changed == np.count_nonzero(base != new)


@pytest.mark.parametrize(
    "gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 200000]
)
@pytest.mark.parametrize("repeat", [1, 3])
def test_gaps_at_the_borders_of_their_bytes(gap: int, repeat: int) -> None:
    base = np.zeros((gap + 1) * repeat + 9, np.uint8)
    new = base.copy()
    new[gap :: gap + 1][:repeat] = 200
    encoded = encode_delta(base, new, item_bytes=1, max_share=100)
    assert encoded is not None
    assert np.array_equal(apply_delta(base, encoded), new)
    assert slow_apply(base.tobytes(), encoded) == new.tobytes()


def test_three_per_cent_of_codes_cost_at_most_eight_per_cent_of_the_bytes() -> None:
    base = random_elements(4_000_000)
    new = changed(base, 0.03)
    encoded = encode_delta(base, new, item_bytes=1)
    assert encoded is not None
    assert np.count_nonzero(base != new) / len(base) == pytest.approx(0.03, rel=0.01)
    assert len(encoded) / len(base) < 0.0605


def test_small_steps_cost_half_a_byte() -> None:
    base = random_elements(4_000_000)
    encoded = encode_delta(base, changed(base, 0.03, step=1), item_bytes=1)
    assert encoded is not None
    assert len(encoded) / len(base) < 0.0455
    wide = random_elements(1_000_000, 2)
    encoded = encode_delta(wide, changed(wide, 0.03, step=1), item_bytes=2)
    assert encoded is not None
    assert len(encoded) / wide.nbytes < 0.023


@pytest.mark.parametrize(("step", "byte"), [(5, 0.5), (100, 1), (10_000, 2)])
def test_steps_are_as_wide_as_they_must_be(step: int, byte: float) -> None:
    base = random_elements(100_000, 4)
    encoded = encode_delta(base, changed(base, 1.0, step=step), item_bytes=4, max_share=1)
    assert encoded is not None
    assert len(encoded) / len(base) == pytest.approx(1 / 8 + byte, rel=0.01)


def test_a_bitmap_serves_where_much_has_changed() -> None:
    base = random_elements(100_000)
    encoded = encode_delta(base, changed(base, 0.3), item_bytes=1)
    assert encoded is not None
    assert len(encoded) / len(base) < 0.125 + 0.3 + 0.01


def test_nothing_changed_costs_next_to_nothing() -> None:
    base = random_elements(100_000)
    encoded = encode_delta(base, base.copy(), item_bytes=1)
    assert encoded is not None
    assert len(encoded) <= 40
    assert np.array_equal(apply_delta(base, encoded), base)


@pytest.mark.parametrize("share", [0.06, 0.5])
def test_a_delta_that_is_not_small_enough_is_none(share: float) -> None:
    base = random_elements(200_000)
    for change in (0.02, 0.04, 0.2, 0.6, 1.0):
        new = changed(base, change)
        encoded = encode_delta(base, new, item_bytes=1, max_share=share)
        whole = encode_delta(base, new, item_bytes=1, max_share=100)
        assert whole is not None
        assert (encoded is None) == (len(whole) > share * len(base))
    assert encode_delta(b"abcd", b"abcx", item_bytes=1) is None  # the header alone is larger


def test_negative_zero_and_not_a_number_are_only_bytes() -> None:
    base = np.array([0.0, np.nan, 1.0, np.inf] * 50, np.float32)
    new = base.copy()
    new[0], new[1] = -0.0, np.frombuffer(b"\x01\x00\xc0\x7f", np.float32)[0]
    encoded = encode_delta(base, new, item_bytes=4)
    assert encoded is not None
    assert apply_delta(base, encoded).tobytes() == new.tobytes()


def test_result_may_go_where_the_base_is() -> None:
    base = random_elements(100_000, 2)
    new = changed(base, 0.05, step=1)
    encoded = encode_delta(base, new, item_bytes=2)
    assert encoded is not None
    out = base.copy()
    assert apply_delta(out, encoded, out=out.view(np.uint8)) is not None
    assert np.array_equal(out, new)
    other = np.empty(base.nbytes, np.uint8)
    assert apply_delta(base, encoded, out=other) is other
    assert np.array_equal(other.view("<u2"), new)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 elements as in the base, found 3"):
        encode_delta(b"abcd", b"abc", item_bytes=1)
    with pytest.raises(ValueError, match="3 bytes are no multiple of 2"):
        encode_delta(b"abc", b"abd", item_bytes=2)
    with pytest.raises(ValueError, match=r"expected one of \[1, 2, 4, 8\], found 3"):
        encode_delta(b"abc", b"abd", item_bytes=3)


def test_another_base_is_refused_by_its_length() -> None:
    base = random_elements(1000)
    encoded = encode_delta(base, changed(base, 0.01), item_bytes=1)
    assert encoded is not None
    with pytest.raises(WeightsCorrupt, match="a delta of 1000 elements of 1 bytes, a base of 999"):
        apply_delta(base[1:], encoded)
    wide = encode_delta(b"\0" * 16, b"\1" + b"\0" * 15, item_bytes=8, max_share=10)
    assert wide is not None
    with pytest.raises(WeightsCorrupt, match="a delta of 2 elements of 8 bytes, a base of 12"):
        apply_delta(b"\0" * 12, wide)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("step", [None, 1])
def test_a_damaged_delta_is_refused_or_wrong_but_never_beyond_its_tensor(
    share: float, step: int | None
) -> None:
    """A flipped bit of a value is for the checksum to find; anything else must not pass."""
    base = random_elements(3000, seed=1)
    encoded = encode_delta(base, changed(base, share, step=step), item_bytes=1, max_share=100)
    assert encoded is not None
    refused = 0
    for place in range(0, len(encoded), 3):
        damaged = bytearray(encoded)
        damaged[place] ^= 1 << place % 8
        try:
            assert len(apply_delta(base, bytes(damaged))) == 3000
        except WeightsCorrupt:
            refused += 1
    assert refused >= 5
    for cut in (0, 5, 23, 24, 30, len(encoded) - 1):
        with pytest.raises(WeightsCorrupt):
            apply_delta(base, encoded[:cut])
    with pytest.raises(WeightsCorrupt, match="1 bytes too much"):
        apply_delta(base, encoded + b"x")


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_steps_as_wide_as_an_element_are_refused(item_bytes: int) -> None:
    """Whoever reads a delta falls back to the whole shard on `WeightsCorrupt` alone."""
    run = struct.pack("<BBxxIII", 0, 3, 1, 1, 0) + bytes([5, 1, 0])
    delta = struct.pack("<BBxxxxxxQQ", 1, item_bytes, 8, 1) + run
    with pytest.raises(WeightsCorrupt, match=f"steps of 16 bits in elements of {8 * item_bytes}"):
        apply_delta(bytes(8 * item_bytes), delta)
