"""The life of a worker process: take a batch, grade check after check, report.

It trusts nothing that it runs: limits are the kernel's or the service's, and it holds no state that
another worker would miss. Results go out after each check that ends more than `FLUSH_S` after the
last report, so what a killed worker has done is rarely done again.
"""

import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.reward.graders import limit
from services.reward.graders.grader import Grader
from services.reward.pool.wire import ProgressPage, encode, receive
from shared.messages import GraderError, Score, Unparseable
from shared.process import die_with_parent
from shared.refusals import fault

FLUSH_S = 0.002
MAX_INTEGER_DIGITS = 100_000


def work(
    graders: Mapping[str, Grader],
    link: socket.socket,
    page: ProgressPage,
    *,
    memory_bytes: int,
    parent_pid: int,
) -> None:
    """Serve frames of [batch, [[grader, response, gold, limit], ...]] until the service goes."""
    die_with_parent(parent_pid)
    # A group of its own, so that whatever a grader starts can be killed with it. Not a session:
    # Linux may schedule those as equals (sched_autogroup), and nice counts within one only.
    os.setpgid(0, 0)
    _limit(memory_bytes)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            batch, checks = receive(link)
            _grade_batch(graders, link, page, batch, checks)


def _grade_batch(
    graders: Mapping[str, Grader],
    link: socket.socket,
    page: ProgressPage,
    batch: int,
    checks: list[tuple[str, str, str, float]],
) -> None:
    done: list[tuple[int, float, dict[str, Any]]] = []
    reported_s = time.monotonic()
    for index, (grader, response, gold, limit_s) in enumerate(checks):
        limit.set_current(limit_s)
        page.write(batch, index)
        begin_s = time.perf_counter()
        outcome, is_spent = _grade(graders, grader, response, gold)
        done.append((index, time.perf_counter() - begin_s, outcome.model_dump()))
        is_last = is_spent or index == len(checks) - 1
        if is_last or time.monotonic() - reported_s > FLUSH_S:
            link.sendall(encode([batch, is_spent, done]))
            done, reported_s = [], time.monotonic()
        if is_spent:
            return


def _grade(
    graders: Mapping[str, Grader], name: str, response: str, gold: str
) -> tuple[Score | Unparseable | GraderError, bool]:
    """The outcome, and whether this process should not be used again."""
    try:
        outcome = graders[name](response, gold)
    except MemoryError:
        return GraderError(reason="out of memory"), True
    except RecursionError:
        return GraderError(reason="nested too deeply"), False
    except ValidationError as err:  # a score beyond its bound, say
        return GraderError(reason=f"no outcome: {fault(err)}"[:300]), False
    except Exception as err:  # noqa: BLE001  a grader may raise anything; it is this check's result
        return GraderError(reason=f"{type(err).__name__}: {str(err)[:200]}"), False
    if not isinstance(outcome, Score | Unparseable):
        return GraderError(reason=f"the grader returned {type(outcome).__name__}"), False
    return outcome, False


def _limit(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(MAX_INTEGER_DIGITS)
