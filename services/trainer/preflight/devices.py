"""The accelerators of this host and what is free of them, without torch: the conductor has none.

Which of them the ranks get is their launcher's business. So the emptiest one counts: what does not
fit there fits on none.
"""

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from pathlib import Path

NODES = ("/dev/nvidia0", "/dev/kfd")
AMD = Path("/sys/class/drm")
QUERY = ("--query-gpu=memory.free", "--format=csv,noheader,nounits")  # in MiB, a line each
TOOL_S = 20.0


@dataclass(frozen=True, slots=True)
class Devices:
    """`free_bytes` of the emptiest; None where neither driver nor tool tells."""

    free_bytes: int | None


async def find_devices() -> Devices | None:
    """None on a host without accelerators."""
    if not _are_there():
        return None
    found = _amd() or await _nvidia()
    return Devices(max(found, default=None))


def _are_there() -> bool:
    return any(Path(node).exists() for node in NODES)


def _amd() -> list[int]:
    return [
        int(total.read_text()) - int(total.with_name("mem_info_vram_used").read_text())
        for total in AMD.glob("card*/device/mem_info_vram_total")
    ]


async def _nvidia() -> list[int]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    process = await asyncio.create_subprocess_exec(tool, *QUERY, stdout=PIPE, stderr=DEVNULL)
    try:
        told, _ = await asyncio.wait_for(process.communicate(), TOOL_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return []
    return read_free(told.decode())


def read_free(told: str) -> list[int]:
    """Bytes of each line of `nvidia-smi`; a device that does not say ([N/A]) is left out."""
    return [int(line) * 2**20 for line in map(str.strip, told.splitlines()) if line.isdigit()]
