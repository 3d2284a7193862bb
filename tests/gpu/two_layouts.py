"""The small job of `layout_world` on two ranks with a GPU each, one layout after the other.

    python -m tests.gpu.two_layouts RANK RELEASE OUT      # once for each rank

Same steps, checkpoints and files as there, so the same comparison holds: over NCCL, in FP32.
"""

import sys
from dataclasses import replace
from pathlib import Path

from tests.integration.layout_world import PAIR, ROUNDS, World, run_rank

NAMES = ("one", "tp2", "pp2", "ep2", "dp2")
_KNOWN = {world.name: world for worlds in ROUNDS for world in worlds}


def _on_the_pair(world: World) -> World:
    return replace(world, ranks=PAIR[: len(world.ranks)])


PAIRED = tuple((_on_the_pair(_KNOWN[name]),) for name in NAMES)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), *map(Path, sys.argv[2:]), PAIRED)
