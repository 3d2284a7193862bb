"""The reward service with a grader that takes its time, one group after the other."""

import asyncio
import os
from typing import Any

from services.reward.__main__ import main
from services.reward.grading import Grading

SECONDS = float(os.environ["SLOW_REWARD_S"])


def slow_down() -> None:
    grade, turn = Grading.grade, asyncio.Lock()

    async def slowly(self: Grading, *args: Any, **kwargs: Any) -> Any:
        async with turn:
            await asyncio.sleep(SECONDS)
        return await grade(self, *args, **kwargs)

    Grading.grade = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    main()
