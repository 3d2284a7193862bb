"""All GPU tests in one command: `python -m tests.gpu.run [--out FILE] [pytest's arguments]`.

What they measure goes to FILE as JSON (benchmarks/results/gpu.json).
"""

import argparse
import os
import sys
from pathlib import Path

import pytest

OUT = Path("benchmarks/results/gpu.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    given, rest = parser.parse_known_args()
    os.environ["GPU_RESULTS"] = str(given.out.resolve())
    # The host's own torch and packages may warn of what ours do not.
    return pytest.main(["tests/gpu", "-rs", "-W", "default", "-p", "no:cacheprovider", *rest])


if __name__ == "__main__":
    sys.exit(main())
