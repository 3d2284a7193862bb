"""What a finished evaluation costs the event loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from services.evaluator import runner
from services.evaluator.config import RunnerConfig
from tests.unit.services.evaluator.test_samples import (
    RIGHT,
    WRONG,
    keep,
    make_plan,
    make_result,
    open_file,
)


async def test_event_loop_goes_on_while_a_summary_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, went_on = make_plan(), threading.Event()
    file = open_file(tmp_path, plan)
    for row in range(3):
        keep(file, make_result(row, [RIGHT, WRONG]))
    loop = asyncio.get_running_loop()
    real = runner.summarise

    def summarise(*args: Any, **fields: Any) -> dict[str, Any]:
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(5.0), "the loop is held up"
        return real(*args, **fields)

    monkeypatch.setattr(runner, "summarise", summarise)
    running = runner.Runner(cast(Any, None), RunnerConfig(), runs_dir=tmp_path)
    nowhere = cast(Any, None)
    result = await running.run(plan, sampler=nowhere, graders=nowhere, stop=asyncio.Event())
    assert result["pass_at_k"]["1"] == 0.5
