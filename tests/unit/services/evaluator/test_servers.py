"""Many samples at a time ask the registry once."""

import asyncio

from services.evaluator.servers import _remembered


async def test_callers_at_the_same_time_share_one_question() -> None:
    asking, most, times = 0, 0, 0

    async def ask() -> str:
        nonlocal asking, most, times
        asking, times = asking + 1, times + 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        return "http://reward"

    known = _remembered(ask)
    assert set(await asyncio.gather(*(known() for _ in range(500)))) == {"http://reward"}
    assert (most, times) == (1, 1)


async def test_an_absence_is_asked_again_soon() -> None:
    answers = [None, "http://reward"]

    async def ask() -> str | None:
        return answers.pop(0)

    known = _remembered(ask)
    assert [await known(), await known()] == [None, None]
    async with asyncio.timeout(60):
        while await known() is None:  # noqa: ASYNC110  only time changes it
            await asyncio.sleep(0.02)
    assert answers == []
