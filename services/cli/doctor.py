"""`doctor`: can this machine run the stack, and if not, what to do about each thing.

Nothing is started or changed. A check is `ok`, `warn` (it works, with a drawback) or `bad`.
"""

import asyncio
import json
import os
import platform
import re
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import redis.asyncio
import redis.exceptions
import typer
from rich.console import Console
from rich.table import Table

from services.cli.run import run
from services.cli.stack import MIN_MEMORY_BYTES, choose_ports
from shared.broker import HOST
from shared.process import MIN_PYTHON, available_memory_bytes, port_in_use

State = Literal["ok", "warn", "bad"]
CONSTRAINTS = Path("requirements/constraints.txt")
NEEDED = ("fastapi", "httpx", "math-verify", "numpy", "pydantic", "redis", "torch", "uvicorn")
MIN_DISK_BYTES = 5 * 10**9
MIN_BROKER = (6, 2)  # XAUTOCLAIM
MIN_KERNEL = (5, 13)  # Landlock
AMD_DEVICE = Path("/dev/kfd")
TIMEOUT_S = 5.0
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and how to mend it (empty when it is well)."""

    name: str
    state: State
    found: str
    fix: str = ""


def doctor(
    ports_from: Annotated[
        int | None, typer.Option(help="First of the ports, as for `up`.", min=0, max=65000)
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    redis_url: Annotated[
        str | None, typer.Option(help="A broker of yours to look at.", metavar="URL")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check versions, memory, disk, ports, GPU and broker; each finding says how to mend it."""

    async def command() -> int:
        found = [
            *check_versions(),
            check_kernel(platform.release()),
            check_memory(available_memory_bytes()),
            check_disk(runs_dir),
            *await check_ports(ports_from),
            await check_gpu(),
        ]
        if redis_url is not None:
            found += await check_broker(redis_url)
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in found]))
        else:
            Console().print(_table(found))
        return 1 if any(one.state == "bad" for one in found) else 0

    run(command())


def check_versions(constraints: Path = CONSTRAINTS) -> Iterator[Check]:
    """Python, and the packages that the services need, against what is pinned."""
    have, need = (".".join(map(str, one[:2])) for one in (sys.version_info, MIN_PYTHON))
    is_new = sys.version_info >= MIN_PYTHON
    fix = "" if is_new else f"make install PYTHON=python{need}"
    yield Check("Python", "ok" if is_new else "bad", have, fix)
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", _text(constraints)))
    for name in NEEDED:
        yield check_package(name, pinned.get(name))


def check_package(name: str, pinned: str | None) -> Check:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "bad", "is not installed", "make demo installs what the services need")
    if pinned is not None and version.split("+")[0] != pinned.split("+")[0]:
        fix = f"pip install -c {CONSTRAINTS} {name}=={pinned}"
        return Check(name, "warn", f"{version}; {pinned} is what was tested", fix)
    return Check(name, "ok", version)


def check_kernel(release: str) -> Check:
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if platform.system() == "Linux" and version >= MIN_KERNEL:
        return Check("kernel", "ok", release)
    fix = "Linux 5.13 or newer; until then the grader `code` answers every check with an error"
    return Check("kernel", "warn", release, fix)


def check_memory(available: int) -> Check:
    found = f"{available / 2**30:.1f} GiB free"
    if available >= MIN_MEMORY_BYTES:
        return Check("memory", "ok", found)
    fix = f"free {MIN_MEMORY_BYTES / 2**30:.0f} GiB, or start fewer replicas (--rollout 1)"
    return Check("memory", "bad", found, fix)


def check_disk(runs_dir: Path) -> Check:
    there = next(one for one in (runs_dir.absolute(), *runs_dir.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.1f} GB free at {there}"
    if free >= MIN_DISK_BYTES:
        return Check("disk", "ok", found)
    return Check("disk", "bad", found, "delete old runs, or name another place with --runs-dir")


async def check_ports(base: int | None) -> list[Check]:
    """Those of `up`: free, or taken by a stack of ours that runs already."""
    ports = choose_ports(num_rollout=2, num_reward=1, base=base)
    return [await _port(name, port) for name, port in ports.by_name().items()]


def _is_broker(port: int) -> bool:
    """Whether what listens there speaks Redis; one that wants a password does."""
    try:
        with socket.create_connection((HOST, port), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


async def _port(name: str, port: int) -> Check:
    what = f"port {port} of the {name}"
    if not port_in_use(HOST, port):
        return Check(what, "ok", "is free")
    if name == "broker" and await asyncio.to_thread(_is_broker, port):
        return Check(what, "ok", "a running broker has it")
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        try:
            answer = await http.get(f"http://{HOST}:{port}/healthz")
        except httpx.HTTPError:
            pass
        else:
            if answer.is_success:
                return Check(what, "ok", "a running stack has it")
    fix = f"stop what uses it (`ss -ltnp 'sport = :{port}'`), or up --ports-from BASE"
    return Check(what, "bad", "is in use by something else", fix)


async def check_gpu() -> Check:
    """A CPU is enough for small policies; a GPU needs a torch that can use it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return check_amd()
    query = (tool, "--query-gpu=name,memory.total", "--format=csv,noheader")
    code, told = await _output(query)
    if code != 0 or not told.strip():
        fix = "nvidia-smi has to list a device first: driver, container toolkit (--gpus all)"
        return Check("GPU", "bad", f"nvidia-smi ends with code {code}", fix)
    return _with_torch("; ".join(line.strip() for line in told.strip().splitlines()), "CUDA")


def check_amd() -> Check:
    """Who may not open the kernel's device sees no GPU, whatever is installed."""
    if not AMD_DEVICE.exists():
        return Check("GPU", "ok", "none found; the embedded engine and the actor run on the CPU")
    if not os.access(AMD_DEVICE, os.R_OK | os.W_OK):
        fix = "join its group; containers get its number as RENDER_GROUP (getent group render)"
        return Check("GPU", "bad", f"this user may not open {AMD_DEVICE}", fix)
    return _with_torch(f"AMD, by {AMD_DEVICE}", "ROCm")


def _with_torch(found: str, kind: str) -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = "none"
    if "+cpu" in version:
        return Check("GPU", "warn", f"{found}, but torch is {version}", f"install a {kind} torch")
    return Check("GPU", "ok", f"{found}; torch {version}")


async def _output(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and what it prints; code -1 when it hangs."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        told, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return -1, ""
    return process.returncode or 0, told.decode(errors="replace")


async def check_broker(url: str) -> list[Check]:
    """Version and settings of a broker that is not ours."""
    client = redis.asyncio.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )
    try:
        server = await client.info("server")
        settings = {
            name: (await client.config_get(name)).get(name, "")
            for name in ("appendonly", "maxmemory", "maxmemory-policy")
        }
    except (redis.exceptions.RedisError, OSError) as err:
        return [Check("broker", "bad", str(err), "start it, and check address and password")]
    finally:
        await client.aclose()
    return judge_broker(str(server["redis_version"]), settings)


def judge_broker(version: str, settings: dict[str, Any]) -> list[Check]:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    policy, keeps = settings["maxmemory-policy"], settings["appendonly"] == "yes"
    is_bounded = settings["maxmemory"] not in ("", "0", 0)
    evicts = is_bounded and policy != "noeviction"
    return [
        Check("broker", "ok", f"version {version}")
        if parts >= MIN_BROKER
        else Check("broker", "bad", f"version {version}", "Redis 6.2 or newer, or Valkey"),
        Check("broker: appendonly", "ok", "yes")
        if keeps
        else Check(
            "broker: appendonly", "warn", "no: a restart loses all work under way",
            "CONFIG SET appendonly yes, and the same in its configuration file",
        ),
        Check("broker: eviction", "ok", f"maxmemory {settings['maxmemory']}, {policy}")
        if not evicts
        else Check(
            "broker: eviction", "bad", f"{policy} throws unread work away when memory is full",
            "CONFIG SET maxmemory-policy noeviction",
        ),
    ]  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _table(found: list[Check]) -> Table:
    table = Table("", "what", "found", "how to mend it", box=None, header_style="dim")
    for one in found:
        colour = _COLOURS[one.state]
        table.add_row(f"[{colour}]{one.state}[/]", one.name, one.found, one.fix)
    return table
