"""`environment/` of a run: what each process that worked on it ran with, a file each.

trainer.json, rank0.json …  when the job begins       replicas': when their event comes
"""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.environment import ENVIRONMENT_EVENT
from shared.messages import Event

ENVIRONMENT = "environment"
MAX_NAME_CHARS = 200  # a file's name may have 255 with what is added


def write_environment(run_dir: Path, process: str, found: Mapping[str, Any]) -> None:
    """A reader sees the old file or the new one."""
    folder = run_dir / ENVIRONMENT
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", process, flags=re.ASCII)[:MAX_NAME_CHARS]
    building = folder / f".{name}.tmp"
    building.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    building.replace(folder / f"{name}.json")


def read_environment(run_dir: Path) -> dict[str, Any]:
    """By process; a run without the folder has none."""
    found = sorted((run_dir / ENVIRONMENT).glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in found}


async def keep_environment(run_dir: Path, event: Event) -> None:
    """Of a replica that says what it runs with; other events are nothing to us."""
    if event.name == ENVIRONMENT_EVENT:
        await asyncio.to_thread(write_environment, run_dir, event.replica, event.fields)
