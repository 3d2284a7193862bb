"""docs/rest.md against a trainer that runs: every command, in order, and the keys of its answer."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.trainer.app import create_app
from services.trainer.config import TrainerConfig
from tests.served import served

PAGE = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
CURL = shutil.which("curl")


def examples() -> list[tuple[str, Any]]:
    """Each block of commands with the answer that stands behind it, if one does."""
    blocks = re.findall(r"```sh\n(.*?)```\n(?:```json\n(.*?)```\n)?", PAGE, re.DOTALL)
    return [(command, json.loads(answer) if answer else None) for command, answer in blocks]


def shape(value: Any) -> Any:
    """Keys, as far as the page shows them; texts and numbers are the run's own."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else []
    return None


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
async def test_every_example_works_as_shown(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = TrainerConfig(redis_url=redis_url, replica="trainer", runs_dir=tmp_path / "runs")
    async with served(create_app(config)) as url:
        told = examples()
        assert len(told) == 12
        script = f"TRAINER={url}\n"
        for command, answer in told[1:]:
            script += command
            found = await _run(script)
            script = script[: -len(command)]
            if "JOB=" in command:
                script += command.splitlines()[0] + "\n"
            if answer is not None:
                assert _without_maps(shape(json.loads(found))) == _without_maps(shape(answer)), (
                    command
                )


def _without_maps(value: Any) -> Any:
    """Maps whose keys are the run's own, such as counts by state."""
    if isinstance(value, dict):
        own = {"counts", "last", "dropped"}
        return {key: None if key in own else _without_maps(one) for key, one in value.items()}
    return [_without_maps(one) for one in value] if isinstance(value, list) else value


async def _run(script: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "bash", "-euc", script, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, script
    return out.decode()
