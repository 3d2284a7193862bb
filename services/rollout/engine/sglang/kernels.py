"""Which kernels a GPU server of DeepSeek-V4 runs: one readable table of paths and platforms.

Variables and their defaults: SGLang 0.5.17 and 0.5.23, `sglang/srt/environ.py`. On ROCm both set
some of them themselves whatever they find (`server_args.py`, `arg_groups/model_hook.py`): there the
table has what they set. A path is always set, never left to a default that the next release may
change, and the launcher logs what it has set.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.rollout.engine.sglang.spec import Kernels, Platform

_CUDA: frozenset[Platform] = frozenset({"cuda"})
_ROCM: frozenset[Platform] = frozenset({"rocm"})
_BOTH = _CUDA | _ROCM


class Path(NamedTuple):
    """One way to compute a part: where it exists, and the variables that choose it."""

    platforms: frozenset[Platform]
    variables: Mapping[str, str]


TABLE: Mapping[str, Mapping[str, Path]] = {
    "mhc_prenorm": {
        "deep_gemm": Path(_CUDA, {"SGLANG_OPT_DEEPGEMM_HC_PRENORM": "1"}),
        "plain": Path(_BOTH, {"SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0"}),
    },
    "mhc_pre": {
        "tilelang": Path(_CUDA, {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "1"}),
        "torch": Path(_BOTH, {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0"}),
    },
    "mhc_post": {
        "tilelang": Path(_CUDA, {"SGLANG_OPT_USE_TILELANG_MHC_POST": "1"}),
        "torch": Path(_BOTH, {"SGLANG_OPT_USE_TILELANG_MHC_POST": "0"}),
    },
    "attention": {
        "flashmla": Path(_CUDA, {}),
        # On gfx950 alone, and not in 0.5.17.
        "aiter_sparse": Path(_ROCM, {"SGLANG_HACK_FLASHMLA_BACKEND": "aiter_sparse"}),
        "tilelang": Path(_ROCM, {"SGLANG_HACK_FLASHMLA_BACKEND": "tilelang"}),
        "triton": Path(_ROCM, {"SGLANG_HACK_FLASHMLA_BACKEND": "triton"}),
        "torch": Path(_ROCM, {"SGLANG_HACK_FLASHMLA_BACKEND": "torch"}),
    },
    "indexer": {
        "deep_gemm": Path(
            _CUDA, {"SGLANG_OPT_USE_TILELANG_INDEXER": "0", "SGLANG_OPT_USE_AITER_INDEXER": "0"}
        ),
        "tilelang": Path(
            _BOTH, {"SGLANG_OPT_USE_TILELANG_INDEXER": "1", "SGLANG_OPT_USE_AITER_INDEXER": "0"}
        ),
        "aiter": Path(
            _ROCM, {"SGLANG_OPT_USE_TILELANG_INDEXER": "0", "SGLANG_OPT_USE_AITER_INDEXER": "1"}
        ),
    },
    "compressor": {
        "paged": Path(_BOTH, {"SGLANG_OPT_USE_ONLINE_COMPRESS": "0"}),
        "online": Path(_CUDA, {"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"}),
    },
    "hash_topk": {
        "fused": Path(_BOTH, {"SGLANG_OPT_USE_FUSED_HASH_TOPK": "1"}),
        "plain": Path(_BOTH, {"SGLANG_OPT_USE_FUSED_HASH_TOPK": "0"}),
    },
}

# What "auto" means: what runs on every GPU of the platform with every version that we know.
PRESETS: Mapping[Platform, Kernels] = {
    "cuda": Kernels(
        # Not deep_gemm: newer servers keep split copies of the mixing matrices for it, and then
        # refuse updates.
        mhc_prenorm="plain",
        mhc_pre="tilelang",
        mhc_post="tilelang",
        attention="flashmla",
        indexer="deep_gemm",
        compressor="paged",
        hash_topk="fused",
    ),
    "rocm": Kernels(
        mhc_prenorm="plain",
        mhc_pre="torch",
        mhc_post="torch",
        attention="tilelang",
        indexer="aiter",
        compressor="paged",
        hash_topk="fused",
    ),
}

_LAST_WITHOUT_COPIES = (0, 5, 17)

# Online updates need these whatever the paths are.
FOR_UPDATES: Mapping[str, str] = {
    # With 1 the grouped output matrix is packed at load, and every reload asserts.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
}


def chosen(asked: Kernels, platform: Platform, *, version: str | None = None) -> Kernels:
    """The paths of a job, `auto` resolved. ValueError names a path that the platform lacks, or with
    which an SGLang of this version takes no updates."""
    preset = PRESETS[platform]
    paths = {
        part: getattr(preset, part) if getattr(asked, part) == "auto" else getattr(asked, part)
        for part in TABLE
    }
    for part, name in paths.items():
        there = [known for known, path in TABLE[part].items() if platform in path.platforms]
        if name not in there:
            raise ValueError(
                f"rollout.sglang.kernels.{part} {name!r} is not on {platform}: {', '.join(there)}"
            )
    is_newer = version is not None and release_numbers(version) > _LAST_WITHOUT_COPIES
    if paths["mhc_prenorm"] == "deep_gemm" and is_newer:
        raise ValueError(
            f"rollout.sglang.kernels.mhc_prenorm 'deep_gemm': SGLang {version} keeps copies of the "
            "mixing matrices for it and refuses every update; 0.5.17 is the last that does not"
        )
    return Kernels(**paths)


def release_numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of a release; what follows it (rc, post, a local name) is left out."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:3])


def environment(kernels: Kernels, *, fp4_experts: bool) -> dict[str, str]:
    """Every variable that the paths need."""
    variables = dict(FOR_UPDATES)
    for part, paths in TABLE.items():
        variables |= paths[getattr(kernels, part)].variables
    # The default is FP4: a release with FP8 experts must say so.
    variables["SGLANG_DSV4_FP4_EXPERTS"] = "1" if fp4_experts else "0"
    return variables
