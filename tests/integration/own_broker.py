"""A broker that a test starts and kills, and that can come back without its last writes."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from shared.broker import broker, broker_url
from shared.process import die_with_parent
from shared.readiness import broker_ready


class OwnBroker:
    def __init__(self, data_dir: Path, port: int) -> None:
        self.data_dir = data_dir
        self.port = port
        self.url = broker_url(port)
        self.process: subprocess.Popen[bytes] | None = None
        self._remembered = data_dir.with_name(f"{data_dir.name}-remembered")

    async def start(self) -> None:
        program = broker(self.data_dir, self.port, appendfsync="always")
        self.process = subprocess.Popen(  # noqa: ASYNC220  starts at once
            program.argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        ready = broker_ready("127.0.0.1", self.port)
        async with asyncio.timeout(60):
            while await ready():  # noqa: ASYNC110  another process, no event
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=60)

    def remember(self) -> None:
        """What is written from here on is what `forget` loses."""
        shutil.copytree(self.data_dir, self._remembered)

    async def forget(self) -> None:
        """Die, and come back as a broker does that had not yet synced its last writes."""
        self.kill()
        shutil.rmtree(self.data_dir)
        self._remembered.rename(self.data_dir)
        await self.start()


@asynccontextmanager
async def running_broker(data_dir: Path, port: int) -> AsyncIterator[OwnBroker]:
    own = OwnBroker(data_dir, port)
    await own.start()
    try:
        yield own
    finally:
        own.kill()
