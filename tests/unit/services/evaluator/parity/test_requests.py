import asyncio
from typing import Any, cast

import pytest

from services.evaluator.parity.requests import ParityRuns


async def test_stop_ends_a_comparison_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def wait_for_ever(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    class Accepted:
        parity_id = "parity-1"

    monkeypatch.setattr(ParityRuns, "_carry_out", wait_for_ever)
    runs = ParityRuns(cast(Any, None), cast(Any, None), cast(Any, None))
    runs._turns.add(cast(Any, Accepted()))
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(runs.run(stop))
        await begun.wait()
        stop.set()
