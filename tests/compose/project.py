"""A Compose project of its own: another name, password and port than any other on the engine."""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from shared.errors import DeadlineExceeded

ROOT = Path(__file__).parents[2]
IMAGES = "tandem-test"  # of every project here: built once
COMMAND_S = 300.0
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Project:
    name: str
    port: int
    password: str = field(default_factory=lambda: secrets.token_hex(16))
    files: ClassVar[tuple[str, ...]] = ("compose.yaml",)

    async def compose(
        self,
        *arguments: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = COMMAND_S,
    ) -> str:
        """What `docker compose` prints; AssertionError with its last words if it fails."""
        files = [word for name in self.files for word in ("-f", name)]
        return await run(
            [*("docker", "compose", "--env-file", os.devnull, "-p", self.name), *files, *arguments],
            env={
                "COMPOSE_PROFILES": "cpu",
                "BROKER_PASSWORD": self.password,
                "TRAINER_PORT": str(self.port),
                "TANDEM_IMAGE": IMAGES,
                **variables,
            },
            timeout_s=timeout_s,
        )

    async def containers(self, service: str) -> list[str]:
        """Ids of the service's running containers, as they name their replicas."""
        return [one[:12] for one in (await self.compose("ps", "-q", service)).split()]

    async def left(self) -> dict[str, list[str]]:
        """What the engine still has of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = {"container": ["ls", "-aq"], "volume": ["ls", "-q"], "network": ["ls", "-q"]}
        found = {
            kind: (await run(["docker", kind, *listing, "--filter", label])).split()
            for kind, listing in kinds.items()
        }
        return {kind: names for kind, names in found.items() if names}


async def run(
    argv: Sequence[str], *, env: dict[str, str] | None = None, timeout_s: float = COMMAND_S
) -> str:
    """Standard output of a command that succeeds within its deadline."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as late:
        raise DeadlineExceeded(f"{' '.join(argv)} to end", timeout_s) from late
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{' '.join(argv)}:\n{err.decode()[-3000:]}"
    return out.decode()


async def until(claim: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not await claim():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:g} s for {what}"
        await asyncio.sleep(0.5)
