"""The routed experts that a server reports, as Tandem records them.

SGLang answers int32 in base64, one row per token that was an input: [tokens - 1, layers, k]. Hash
layers come back as zeros there (seen on 0.5.17), so theirs are read from the version's own table.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.rollout.engine.sglang.client import ServerRefused
from shared.models.deepseek_v4.architecture import Architecture
from shared.routes import expert_dtype

Tables = Mapping[int, np.ndarray]  # hash layer -> int [V, k]


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
