"""What a server is started with: every choice is set, and what a platform lacks is refused."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.checkpoint import server_config
from services.rollout.engine.sglang.kernels import TABLE, chosen, environment
from services.rollout.engine.sglang.launch import GPU_PACKAGE, launch_of
from services.rollout.engine.sglang.spec import CONTEXT_SPARE, Kernels, ServerSpec
from shared.job_cluster import SGLangKernelsSection
from shared.models.deepseek_v4.architecture import Architecture

ARCH = Architecture.load(Path("assets/tiny-dsv4"))


def engine(server: ServerSpec) -> EngineSpec:
    return EngineSpec(ARCH, 48, 4096, True, 1, record_entries=True, server=server)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_server_gets_every_path_and_what_updates_need(platform: str) -> None:
    server = ServerSpec("/checkpoint", platform=platform, max_total_tokens=524288)  # type: ignore[arg-type]
    launch = launch_of(engine(server), server, model=Path("/checkpoint"), port=4000, mark="m")
    assert launch.environment["SGLANG_OPT_FP8_WO_A_GEMM"] == "0"
    assert launch.environment["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] == "0"
    assert launch.environment["SGLANG_DSV4_FP4_EXPERTS"] == "0"
    assert launch.environment["SGLANG_OPT_USE_FUSED_HASH_TOPK"] == "1"
    text = " ".join(launch.arguments)
    assert "--max-running-requests 48" in text
    assert "--enable-return-routed-experts" in text
    assert "--enable-return-indexer-topk" in text
    assert "--max-total-tokens 524288" in text
    assert "--enable-return-routed-experts" in text


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_ranks_that_share_an_attention_layer_get_our_class_of_model(platform: str) -> None:
    """Found from any folder; a single rank keeps no copies and has SGLang's own."""
    server = ServerSpec("/checkpoint", platform=platform, tensor_parallel=2)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        launch = launch_of(engine(server), server, model=Path("/c"), port=4000, mark="m")
    variables = launch.environment
    assert variables["SGLANG_EXTERNAL_MODEL_PACKAGE"] == GPU_PACKAGE
    first = Path(variables["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / GPU_PACKAGE.replace(".", "/") / "deepseek_v4.py").exists()
    assert "cpu_site" not in variables["PYTHONPATH"]
    assert [one["package"] for one in logs if one["event"] == "sglang_model_class"] == [GPU_PACKAGE]
    alone = replace(server, tensor_parallel=1)
    variables = launch_of(engine(alone), alone, model=Path("/c"), port=1, mark="m").environment
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in variables


def test_a_path_that_the_platform_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"kernels\.attention 'aiter_sparse' is not on cuda"):
        chosen(Kernels(attention="aiter_sparse"), "cuda")
    with pytest.raises(ValueError, match=r"kernels\.indexer 'deep_gemm' is not on rocm: tilelang"):
        chosen(Kernels(indexer="deep_gemm"), "rocm")


def test_one_choice_changes_its_variables_alone() -> None:
    preset = environment(chosen(Kernels(), "rocm"), fp4_experts=True)
    other = environment(chosen(Kernels(hash_topk="plain"), "rocm"), fp4_experts=True)
    assert preset["SGLANG_DSV4_FP4_EXPERTS"] == "1"
    assert dict(preset.items() - other.items()) == {"SGLANG_OPT_USE_FUSED_HASH_TOPK": "1"}


@pytest.mark.parametrize("version", [None, "0.5.17", "0.5.17.post1"])
def test_a_server_without_copies_of_the_mixing_matrices_may_use_deep_gemm(
    version: str | None,
) -> None:
    kernels = chosen(Kernels(mhc_prenorm="deep_gemm"), "cuda", version=version)
    variables = environment(kernels, fp4_experts=False)
    assert variables["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] == "1"


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23", "0.6.0rc1"])
def test_deep_gemm_is_refused_where_it_would_refuse_every_update(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    server = ServerSpec("/c", platform="cuda", kernels=Kernels(mhc_prenorm="deep_gemm"))
    with pytest.raises(ValueError, match=f"'deep_gemm': SGLang {version} keeps copies"):
        launch_of(engine(server), server, model=Path("/c"), port=4000, mark="m")


def test_the_rocm_preset_is_what_every_such_gpu_and_version_runs() -> None:
    """`aiter_sparse` raises on any but gfx950, and servers turn TileLang's mixing off."""
    preset = chosen(Kernels(), "rocm")
    assert (preset.attention, preset.mhc_pre, preset.mhc_post) == ("tilelang", "torch", "torch")
    with pytest.raises(ValueError, match=r"kernels\.mhc_pre 'tilelang' is not on rocm: torch"):
        chosen(Kernels(mhc_pre="tilelang"), "rocm")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", [None, 8192])
def test_the_tokens_that_a_job_asks_for_are_the_only_ones_said(
    platform: str, asked: int | None
) -> None:
    server = ServerSpec("/c", platform=platform, max_total_tokens=asked)  # type: ignore[arg-type]
    arguments = launch_of(engine(server), server, model=Path("/c"), port=4000, mark="m").arguments
    own = [str(2 * 48 * 4096)] if platform == "cpu" else []
    given = [arguments[at + 1] for at, one in enumerate(arguments) if one == "--max-total-tokens"]
    assert given == ([str(asked)] if asked else own)


def test_a_job_can_name_exactly_the_paths_that_there_are() -> None:
    fields = SGLangKernelsSection.model_fields
    assert list(fields) == list(TABLE)
    for part, paths in TABLE.items():
        assert set(fields[part].annotation.__args__) == {"auto", *paths}  # type: ignore[union-attr]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_sample_may_fill_the_context_and_go_on_one_token_before_its_end(platform: str) -> None:
    """SGLang's scheduler refuses inputs of `context - 6` tokens and more, and samples at the most
    `context - 2 - input`."""
    server = ServerSpec("/checkpoint", platform=platform)  # type: ignore[arg-type]
    asked = engine(server)
    arguments = launch_of(asked, server, model=Path("/c"), port=4000, mark="m").arguments
    context = int(arguments[arguments.index("--context-length") + 1])
    ours = asked.context_length
    assert ours < context - 6  # all of it can be scored, and gone on from
    assert context - 2 - (ours - 1) >= 1
    config = server_config(ARCH, "cpu", context_length=ours, quantise_activations=True)
    assert config["max_position_embeddings"] == ours + CONTEXT_SPARE
