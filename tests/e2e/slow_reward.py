"""The reward service with a grader that takes its time, one group after the other.

At least half as long as the sampling of a group, of which several run at once, so that it is the
slow one on a busy machine, too.
"""

import asyncio
import os
from typing import Any

from services.reward.__main__ import main
from services.reward.worker import GradeWorker
from shared.messages import RolloutGroup
from shared.spans import span

SECONDS = float(os.environ["SLOW_REWARD_S"])


def slow_down() -> None:
    grade, turn = GradeWorker._grade, asyncio.Lock()

    async def slowly(self: GradeWorker, group: RolloutGroup, *args: Any) -> None:
        with span("group", "groups", group=group.prompt.group_id):
            async with turn:
                await asyncio.sleep(max(SECONDS, group.sampling_s / 2))
        await grade(self, group, *args)

    GradeWorker._grade = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    main()
