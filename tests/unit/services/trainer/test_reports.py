"""Reports: asked-for ones in turn, a job's last one at once, never two of one run together."""

import asyncio
from pathlib import Path

import pytest

from services.trainer.events import EVENTS_FILE
from services.trainer.jobs.reports import Reports


class Held(Reports):
    """Each report takes until `done`; `running` are under way."""

    def __init__(self) -> None:
        super().__init__(deadline_s=1)
        self.running: list[str] = []
        self.done = asyncio.Event()

    async def _make(self, run_dir: Path) -> None:
        self.running.append(run_dir.name)
        await self.done.wait()
        self.running.remove(run_dir.name)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / EVENTS_FILE).touch()
    return folders


async def settled(reports: Held, num: int) -> list[str]:
    """What runs once `num` reports do, and had the others time to begin."""
    async with asyncio.timeout(60):
        while len(reports.running) < num:  # noqa: ASYNC110  the list is the condition
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    return sorted(reports.running)


async def test_the_report_of_a_job_that_ends_does_not_queue_behind_those_asked_for(
    runs: list[Path],
) -> None:
    reports = Held()
    asked = [asyncio.create_task(reports.refresh(run, is_running=False)) for run in runs[:2]]
    assert len(await settled(reports, 1)) == 1
    ended = asyncio.create_task(reports.write(runs[2]))
    assert (await settled(reports, 2))[-1] == "c"
    reports.done.set()
    await asyncio.gather(*asked, ended)


async def test_one_run_has_one_report_at_a_time(runs: list[Path]) -> None:
    reports = Held()
    both = [
        asyncio.create_task(reports.refresh(runs[0], is_running=False)),
        asyncio.create_task(reports.write(runs[0])),
    ]
    assert await settled(reports, 1) == ["a"]
    reports.done.set()
    for task in both:
        await asyncio.wait_for(task, 60)
