"""The routed experts and the indexers' picks that a server reports, as Tandem records them.

SGLang answers int32 in base64, one row per token that was an input: [tokens - 1, layers, k] experts
and [tokens - 1, indexed layers, index_topk] entries of the token's own sequence. Hash layers come
back as zeros (seen on 0.5.17), so theirs are read from the version's own table.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.client import ServerRefused
from shared.models.deepseek_v4.architecture import C4_RATIO, Architecture
from shared.routes import (
    TokenRoutes,
    expert_dtype,
    first_selecting_token,
    indexed_layers,
    num_entry_bytes,
    pack_bits,
)

Tables = Mapping[int, np.ndarray]  # hash layer -> int [V, k]


def tables_of(canonical: Mapping[str, Tensor]) -> Tables:
    """Expert ids by token of each hash layer."""
    return {
        int(name.split(".")[1]): table.numpy()
        for name, table in canonical.items()
        if name.startswith("layers.") and name.endswith(".tid2eid")
    }


def routes_of(
    meta: dict[str, Any], token_ids: list[int], spec: EngineSpec, tables: Tables
) -> TokenRoutes:
    """What `spec` asks to be recorded of a sequence, all its tokens but the last."""
    return TokenRoutes(
        expert_ids(meta, token_ids, spec.arch, tables) if spec.record_experts else None,
        entry_bits(meta, token_ids, spec.arch) if spec.record_entries else None,
    )


def joined(before: TokenRoutes | None, now: TokenRoutes) -> TokenRoutes:
    """The rows of `before` as they were computed, then those that are new in `now`."""
    if before is None:
        return now
    return TokenRoutes(
        _joined(before.expert_ids, now.expert_ids), _joined(before.entry_bits, now.entry_bits)
    )


def _joined(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    if before is None or now is None:
        return now
    kept = now.copy()
    width = before.shape[-1]
    kept[: len(before), ..., width:] = 0  # entries that the earlier tokens could not see
    kept[: len(before), ..., :width] = before
    return kept


def expert_ids(
    meta: dict[str, Any], token_ids: list[int], arch: Architecture, tables: Tables
) -> np.ndarray:
    """Uint8 (uint16 above 256 experts) [tokens - 1, layers, k]; ServerRefused names what is off."""
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise ServerRefused("the server reports no routed experts: --enable-return-routed-experts")
    raw = np.frombuffer(base64.b64decode(encoded), "<i4")
    shape = (len(token_ids) - 1, arch.num_hidden_layers, arch.num_experts_per_tok)
    if raw.size != np.prod(shape):
        raise ServerRefused(f"{raw.size} expert ids came for {list(shape)}")
    ids = raw.reshape(shape)
    bad = ids[(ids < 0) | (ids >= arch.n_routed_experts)]
    if bad.size:
        raise ServerRefused(f"expert id {bad[0]} is not below {arch.n_routed_experts}")
    ids = ids.astype(expert_dtype(arch))
    inputs = np.array(token_ids[:-1], np.int64)
    for layer, table in tables.items():
        ids[:, layer] = table[inputs]
    return ids


def entry_bits(meta: dict[str, Any], token_ids: list[int], arch: Architecture) -> np.ndarray:
    """Uint8 [tokens - 1, indexed layers, bytes], a bit per kept entry.

    A token that sees no more entries than an indexer keeps has no bits, as the embedded engine
    records it. ServerRefused names a token that has not exactly `index_topk` entries it can see.
    """
    encoded = meta.get("indexer_topk")
    if encoded is None:
        raise ServerRefused("the server reports no indexer picks: --enable-return-indexer-topk")
    raw = np.frombuffer(base64.b64decode(encoded), "<i4")
    num_tokens, layers = len(token_ids) - 1, indexed_layers(arch)
    shape = (num_tokens, len(layers), arch.index_topk)
    if raw.size != np.prod(shape):
        raise ServerRefused(f"{raw.size} indexer picks came for {list(shape)}")
    picks = raw.reshape(shape)
    bits = np.zeros((num_tokens, len(layers), num_entry_bytes(num_tokens)), np.uint8)
    first = first_selecting_token(arch)
    visible = (np.arange(first, num_tokens) + 1) // C4_RATIO
    for at, layer in enumerate(layers):  # one at a time: the bits are small, their source is not
        chosen = picks[first:, at]
        _check_picks(chosen, visible, first, layer)
        kept = np.zeros((len(chosen), num_tokens // C4_RATIO), np.bool_)
        np.put_along_axis(kept, chosen, True, axis=1)
        bits[first:, at] = pack_bits(kept, bits.shape[-1])
    return bits


def _check_picks(chosen: np.ndarray, visible: np.ndarray, first: int, layer: int) -> None:
    ordered = np.sort(chosen, axis=1)
    unseen = (ordered[:, 0] < 0) | (ordered[:, -1] >= visible)
    bad = np.flatnonzero(unseen | (np.diff(ordered, axis=1) == 0).any(1))
    if len(bad):
        token = int(bad[0])
        raise ServerRefused(
            f"layer {layer}, token {first + token}: picks {chosen[token].tolist()[:8]} are not "
            f"{chosen.shape[1]} different ones of its {visible[token]} entries"
        )
