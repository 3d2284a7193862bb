"""What may be rolled back to while the next version is on its way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.trainer.books import Books
from services.trainer.events import EventLog, event_maker
from services.trainer.publisher import Publisher
from services.trainer.rollback import Rollback
from services.trainer.versions import VersionStore


async def test_a_version_that_is_only_being_exported_is_no_way_back(tmp_path: Path) -> None:
    """Published meanwhile it would be current and rolled back to, and no step would begin."""
    targets: list[int | None] = []

    async def roll_back(version: int | None) -> None:
        targets.append(version)

    publisher = SimpleNamespace(current=2, roll_back=roll_back)
    store = SimpleNamespace(versions=lambda: [1, 2, 3], check=lambda version: None)
    record: Any = SimpleNamespace(note=lambda event: None)
    books = Books(tmp_path / "books.sqlite")
    rollback = Rollback(
        cast(Publisher, publisher),
        cast(VersionStore, store),
        books=books,
        record=cast(EventLog, record),
        events=event_maker("job", "trainer"),
    )
    with pytest.raises(LookupError, match=r"version 3 is not kept; kept are \[1, 2\]"):
        await rollback.to(3)
    assert not rollback.is_on
    await rollback.to(1)
    assert rollback.is_on
    await rollback.to(2)
    assert not rollback.is_on
    assert targets == [1, None]
    books.close()
