"""Two processes, a GPU for each; not forked, since CUDA does not survive that."""

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

RANKS = 2
_POLL_S = 0.2


class Pair:
    """`python -m MODULE RANK ARGUMENTS...` for the first ranks; leaving the block ends them."""

    def __init__(self, module: str, arguments: list[str], *, log: Path, ranks: int = RANKS) -> None:
        self._log = log
        with log.open("wb") as output:
            self._children = [
                subprocess.Popen(
                    [sys.executable, "-m", module, str(rank), *arguments],
                    stdout=output,
                    stderr=output,
                )
                for rank in range(ranks)
            ]

    def finish(self, timeout_s: float) -> None:
        """Wait for their end. AssertionError with that of the log when one fails or is late."""
        ends_s = time.monotonic() + timeout_s
        while any(child.poll() is None for child in self._children):
            assert not any(child.returncode for child in self._children), self.tail()
            assert time.monotonic() < ends_s, f"late after {timeout_s} s: {self.tail()}"
            time.sleep(_POLL_S)
        assert not any(child.returncode for child in self._children), self.tail()

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.kill()
            child.wait()
