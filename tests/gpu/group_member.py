"""A server's part in groups that move a version between two GPUs, in a process of its own.

    python -m tests.gpu.group_member STAGED OUT GROUP...     # each GROUP a GroupTransfer

What one group brought lies in a folder of its name in OUT. Its GPU is the only one that it sees.
"""

import shutil
import sys
from pathlib import Path

from services.rollout.engine.weights import receive_version
from shared.weights.manifest import INCOMING_FILE, MANIFEST_FILE
from shared.weights.protocol import GroupTransfer


def main(staged: Path, out: Path, groups: list[str]) -> None:
    for text in groups:
        group = GroupTransfer.model_validate_json(text)
        folder = out / group.name
        folder.mkdir(parents=True)
        shutil.copy(staged / MANIFEST_FILE, folder / INCOMING_FILE)
        receive_version(folder, group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
