"""A second node with ranks without a model.

python -m tests.integration.node_program URL [SECONDS_TO_FIND_THE_RUN_FOLDER [MODULE_OF_RANKS]]
"""

import asyncio
import sys

from services.trainer.node import Node
from tests.integration.ranks_world import PROGRAM

if __name__ == "__main__":
    folder_s = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    program = ("-m", sys.argv[3]) if len(sys.argv) > 3 else PROGRAM
    node = Node(sys.argv[1], number=1, lost_s=60.0, folder_s=folder_s, program=program)
    asyncio.run(node.run())
