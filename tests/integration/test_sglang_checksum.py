"""The checksum of a version takes longer than its load: the server samples before it is known."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.sglang import versions
from tests.integration.fake_sglang import FakeServer
from tests.integration.sglang_world import NEW, OLD, attached

SAMPLED_S = 60.0


async def test_a_version_is_sampled_before_its_checksum_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, handed_over = threading.Event(), versions.checksum_of

    def late(*given: Any, **more: Any) -> str:
        assert may_end.wait(SAMPLED_S)
        return handed_over(*given, **more)

    async with attached(FakeServer(), tmp_path) as world:
        old = await world.activate(OLD)
        monkeypatch.setattr(versions, "checksum_of", late)
        updating = asyncio.create_task(world.activate(NEW))
        try:
            async with asyncio.timeout(SAMPLED_S):
                while await world.sample() == [(old, 4)]:
                    pass
            assert not updating.done()
        finally:
            may_end.set()
            await updating


async def test_the_same_weights_under_another_number_are_taken(tmp_path: Path) -> None:
    """They score as before to the last bit, which of other weights would be refused."""
    async with attached(FakeServer(), tmp_path) as world:
        for _ in range(3):
            number = await world.activate(NEW)
            assert await world.sample() == [(number, 4)]
