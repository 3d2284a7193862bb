"""Packed routes: what comes back is what went in, and nothing else is taken for it."""

import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.routes import (
    TokenRoutes,
    first_selecting_token,
    indexed_layers,
    num_entry_bytes,
    pack_bits,
    pack_routes,
    unpack_bits,
    unpack_routes,
)
from tests.tiny_deepseek_v4 import DEMO, FLASH

ASKED = {"routing": True, "indexer": True, "of": "g1.0"}
MANY_EXPERTS = replace(DEMO, n_routed_experts=300)


def random_routes(num_tokens: int, *, arch=DEMO, seed: int = 0) -> TokenRoutes:
    rng = np.random.default_rng(seed)
    layers, top_k = arch.num_hidden_layers, arch.num_experts_per_tok
    order = rng.random((num_tokens, layers, arch.n_routed_experts)).argsort(-1)
    ids = order[..., :top_k].astype("u1" if arch.n_routed_experts <= 256 else "<u2")
    indexed = len(indexed_layers(arch))
    kept = np.zeros((num_tokens, indexed, num_tokens // 4), bool)
    for token in range(first_selecting_token(arch), num_tokens):
        for layer in range(indexed):
            kept[token, layer, rng.permutation((token + 1) // 4)[: arch.index_topk]] = True
    return TokenRoutes(ids, pack_bits(kept, num_entry_bytes(num_tokens)))


def packed(routes: TokenRoutes, **changed: object) -> bytes:
    return msgpack.packb(msgpack.unpackb(pack_routes(routes)) | changed)


@pytest.mark.parametrize("arch", [DEMO, MANY_EXPERTS])
@pytest.mark.parametrize("num_tokens", [0, 1, 14, 15, 16, 61])
def test_routes_come_back_as_they_were(num_tokens: int, arch) -> None:
    routes = random_routes(num_tokens, arch=arch)
    found = unpack_routes(pack_routes(routes), arch, num_tokens, **ASKED)
    assert found.expert_ids is not None
    assert found.entry_bits is not None
    assert found.expert_ids.dtype == routes.expert_ids.dtype
    assert np.array_equal(found.expert_ids, routes.expert_ids)
    assert np.array_equal(found.entry_bits, routes.entry_bits)


@given(st.integers(0, 40), st.integers(0, 9), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_bits_are_the_entries(num_entries: int, num_bytes: int, seed: int) -> None:
    kept = np.random.default_rng(seed).random((3, num_entries)) < 0.5
    kept[:, 8 * num_bytes :] = False
    assert np.array_equal(unpack_bits(pack_bits(kept, num_bytes), num_entries), kept)


def test_an_expert_takes_one_byte_and_an_entry_one_bit() -> None:
    ids = np.zeros((4096, 43, 6), np.uint8)
    assert ids.nbytes == 4096 * 43 * 6
    assert num_entry_bytes(4096) == 128
    assert len(indexed_layers(FLASH)) == 21
    assert first_selecting_token(FLASH) == 2051


def test_parts_that_are_not_asked_for_are_not_read() -> None:
    blob = packed(random_routes(20), entries=None)
    found = unpack_routes(blob, DEMO, 20, routing=True, indexer=False, of="g1.0")
    assert found.entry_bits is None
    with pytest.raises(ValueError, match=r"indexer entries of g1\.0: no compressed bytes"):
        unpack_routes(blob, DEMO, 20, **ASKED)


def spoilt_experts(value: int, *, place: tuple[int, int, int]) -> bytes:
    routes = random_routes(20)
    assert routes.expert_ids is not None
    routes.expert_ids[place] = value
    return pack_routes(routes)


def spoilt_entries(token: int, entries: list[int]) -> bytes:
    routes = random_routes(20)
    assert routes.entry_bits is not None
    kept = unpack_bits(routes.entry_bits, 5)
    kept[token, 1] = False
    kept[token, 1, entries] = True
    return pack_routes(TokenRoutes(routes.expert_ids, pack_bits(kept, 1)))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (spoilt_experts(8, place=(7, 2, 1)), "expert 8 at token 7, layer 2; the model has 8"),
        (
            packed(random_routes(19)),
            "routes of g1.0: they are of 19 tokens, 20 are needed",
        ),
        (
            packed(random_routes(19), tokens=20),
            r"expert ids of g1.0: 152 bytes, 20 x 4 x 2 values take 160",
        ),
        (
            packed(random_routes(20), experts=zlib.compress(bytes(10**7))),
            "expert ids of g1.0: more than 160 bytes, 20 x 4 x 2 values take 160",
        ),
        (
            packed(random_routes(20), experts=pack_routes(random_routes(20))[:40]),
            r"expert ids of g1.0: no compressed bytes",
        ),
        (
            packed(random_routes(20), experts=zlib.compress(bytes(160))[:-5]),
            "expert ids of g1.0: 160 bytes, 20 x 4 x 2 values take 160",
        ),
        (packed(random_routes(20), experts=[1, 2]), "expert ids of g1.0: no compressed bytes"),
        (pack_routes(random_routes(20))[:50], "routes of g1.0: 50 bytes that are no routes"),
        (b"", "routes of g1.0: 0 bytes that are no routes"),
        (msgpack.packb([1]), "bytes that are no routes"),
        (spoilt_entries(19, [0, 1]), "2 entries, not 3, at token 19, layer 3 .5 are visible"),
        (spoilt_entries(14, [0]), "1 entries, not 0, at token 14, layer 3 .3 are visible"),
        (spoilt_entries(16, [0, 1, 4]), "an entry that is not visible yet at token 16, layer 3"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name_and_bound(blob: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_routes(blob, DEMO, 20, **ASKED)


def test_an_expert_twice_is_refused() -> None:
    routes = random_routes(5)
    assert routes.expert_ids is not None
    routes.expert_ids[3, 1] = 6
    with pytest.raises(ValueError, match=r"an expert twice among \[6, 6\] at token 3, layer 1"):
        unpack_routes(pack_routes(routes), DEMO, 5, **ASKED)
