"""A second node with ranks without a model: `python -m tests.integration.node_program URL`."""

import asyncio
import sys

from services.trainer.node import Node
from tests.integration.ranks_world import PROGRAM

if __name__ == "__main__":
    asyncio.run(Node(sys.argv[1], number=1, lost_s=60.0, program=PROGRAM).run())
