"""What may be rolled back to while the next version is on its way."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.trainer.books import Books
from services.trainer.events import EventLog, event_maker
from services.trainer.publisher import Publisher
from services.trainer.rollback import Rollback
from services.trainer.versions import VersionStore
from shared.messages import Event


async def test_a_version_that_is_only_being_exported_is_no_way_back(tmp_path: Path) -> None:
    """Published meanwhile it would be current and rolled back to, and no step would begin."""
    targets: list[int | None] = []

    async def roll_back(version: int | None) -> None:
        targets.append(version)
        publisher.rolled_back_to = version
        if breaks:
            raise ConnectionError(breaks.pop())

    breaks: list[str] = []

    publisher = SimpleNamespace(
        current=2, rolled_back_to=None, roll_back=roll_back, tidying=asyncio.Lock()
    )
    store = SimpleNamespace(versions=lambda: [1, 2, 3], check=lambda version: None)
    told: list[Event] = []
    record: Any = SimpleNamespace(note=told.append)
    books = Books(tmp_path / "books.sqlite")
    rollback = Rollback(
        cast(Publisher, publisher),
        cast(VersionStore, store),
        job_id="job",
        books=books,
        record=cast(EventLog, record),
        events=event_maker("job", "trainer"),
    )
    with pytest.raises(LookupError, match=r"version 3 is not kept; kept are \[1, 2\]"):
        await rollback.to(3)
    await rollback.to(2)  # of which there is none to end
    assert (rollback.is_on, rollback.doing, rollback.warnings, told) == (False, None, [], [])
    await rollback.to(1)
    assert rollback.is_on
    assert rollback.doing == (
        "serving version 1 by a rollback (training waits until "
        "`tandem weights rollback job --to 2` ends it)"
    )
    assert len(rollback.warnings) == 1
    await rollback.to(2)
    assert (rollback.is_on, rollback.doing, rollback.warnings) == (False, None, [])
    assert [(event.name, event.fields) for event in told] == [
        ("rollback_started", {"policy_version": 1, "current_version": 2}),
        ("rollback_ended", {"policy_version": 1, "current_version": 2}),
    ]
    breaks.append("the broker is gone")
    with pytest.raises(ConnectionError):
        await rollback.to(1)
    assert rollback.is_on  # servers go there: no step may begin
    assert targets == [1, None, 1]
    books.close()
