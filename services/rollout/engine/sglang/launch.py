"""How a server is started on each platform: the command line and the environment, with reasons."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.kernels import chosen, environment
from services.rollout.engine.sglang.spec import CONTEXT_SPARE, ServerSpec, python_path

log = structlog.get_logger()

EXTERNAL_PACKAGE = "services.rollout.engine.sglang.external"
GPU_PACKAGE = "services.rollout.engine.sglang.gpu_model"
MARK = "TANDEM_SGLANG_SERVER"  # in the environment of a server and all that it starts


@dataclass(frozen=True, slots=True)
class Launch:
    """A child process to be: `arguments` follow the interpreter."""

    arguments: list[str]
    environment: dict[str, str]


def launch_of(
    engine: EngineSpec, server: ServerSpec, *, model: Path, port: int, mark: str
) -> Launch:
    """The command for a server of `model` on loopback, whose processes are known by `mark`."""
    arguments = [
        "-m",
        "sglang.launch_server",
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--max-running-requests", str(engine.max_running_requests)),
        *("--context-length", str(engine.context_length + CONTEXT_SPARE)),
        *("--tensor-parallel-size", str(server.tensor_parallel)),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        "--skip-tokenizer-init",
    ]
    if server.stream_interval:
        arguments += ["--stream-interval", str(server.stream_interval)]
    if server.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(server.max_total_tokens)]
    more, variables = _cpu(engine, server) if server.platform == "cpu" else _gpu(engine, server)
    arguments += [*more, *server.extra_arguments]
    return Launch(arguments, {**os.environ, **variables, MARK: mark})


def _cpu(engine: EngineSpec, server: ServerSpec) -> tuple[list[str], dict[str, str]]:
    arguments = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        "--sleep-on-idle",  # or its scheduler keeps a core busy with waiting
        *("--mem-fraction-static", "0.3"),
    ]
    if server.max_total_tokens is None:  # what fits would be most of the host's memory
        tokens = 2 * engine.max_running_requests * engine.context_length
        arguments += ["--max-total-tokens", str(tokens)]
    return arguments, {
        "PYTHONPATH": python_path(),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": EXTERNAL_PACKAGE,
        "OMP_NUM_THREADS": str(engine.num_threads),
        "HF_HUB_OFFLINE": "1",
    }


def _gpu(engine: EngineSpec, server: ServerSpec) -> tuple[list[str], dict[str, str]]:
    kernels = chosen(server.kernels, server.platform, version=installed_version())
    log.info("sglang_kernels", platform=server.platform, **asdict(kernels))
    arguments = ["--enable-return-routed-experts", *("--mm-feature-transport", "cpu")]
    if engine.record_entries:
        arguments.append("--enable-return-indexer-topk")
    return arguments, {
        **environment(kernels, fp4_experts=engine.arch.weight_format == "fp4"),
        # A server compiles what it meets; compiling ahead of that takes minutes at each start.
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
        "SGLANG_DSV4_MHC_PREWARM": "0",  # of 0.5.17; later servers have none
        # Ours is set for Megatron; the server compiles parts of what it captures.
        "TORCHDYNAMO_DISABLE": "0",
        "HF_HUB_OFFLINE": "1",
        **_model_class(server),
    }


def _model_class(server: ServerSpec) -> dict[str, str]:
    """Ours over SGLang's where ranks keep copies of the attention sinks. Whatever the version: one
    that refreshes them itself is refreshed twice, and each tells after every update what it has."""
    if server.tensor_parallel == 1:
        return {}
    log.info("sglang_model_class", package=GPU_PACKAGE, because="copies of the attention sinks")
    return {
        "PYTHONPATH": python_path(on_cpu=False),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": GPU_PACKAGE,
    }


def interpreter_of(server: ServerSpec) -> str:
    return server.python or sys.executable


def installed_version() -> str | None:
    """Of the SGLang of this interpreter, which is the server's, too; None where it says none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_installed(server: ServerSpec) -> None:
    """FileNotFoundError when this interpreter lacks what it is to start or hand tensors over to."""
    if server.url is not None and server.transport == "disk":
        return
    if importlib.util.find_spec("sglang") is None:
        raise FileNotFoundError(
            f"SGLang is not installed for {sys.executable}: ROLLOUT_SGLANG__PYTHON names the "
            "interpreter that has it"
        )
