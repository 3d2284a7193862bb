"""An application behind a real port of this process, for the time of a `with` block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI

from shared.process import free_port


@contextlib.asynccontextmanager
async def served(
    app: FastAPI, *, port: int | None = None, lifespan: bool = True, force: bool = False
) -> AsyncIterator[str]:
    """Its URL. `force` breaks off what is still being answered at the end."""
    port = port or free_port()
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_config=None, lifespan="on" if lifespan else "off"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not server.started:
            assert not task.done(), f"the application did not start on port {port}"
            await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = force
        await asyncio.wait_for(task, 60)
