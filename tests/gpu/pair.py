"""Two processes, a GPU for each; not forked, since CUDA does not survive that."""

import subprocess
import sys
import time
from pathlib import Path

RANKS = 2
_POLL_S = 0.2


def run_pair(module: str, arguments: list[str], *, log: Path, timeout_s: float) -> None:
    """`python -m MODULE RANK ARGUMENTS...` for both ranks, until both have ended.

    AssertionError with the end of their log when one fails or is late; then none is left.
    """
    ends_s = time.monotonic() + timeout_s
    with log.open("wb") as output:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), *arguments],
                stdout=output,
                stderr=output,
            )
            for rank in range(RANKS)
        ]
        try:
            while any(child.poll() is None for child in children):
                failed = [child.args for child in children if child.returncode not in (None, 0)]
                assert not failed, _tail(log)
                assert time.monotonic() < ends_s, f"late after {timeout_s} s: {_tail(log)}"
                time.sleep(_POLL_S)
        finally:
            for child in children:
                child.kill()
                child.wait()
    assert not any(child.returncode for child in children), _tail(log)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
