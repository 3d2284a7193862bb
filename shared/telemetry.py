"""Logs and metrics of one process.

Every record, ours or a library's, takes the same chain: a console for people, JSON lines for
machines. What identifies the process is stamped by the chain, so threads and children's callbacks
cannot lose it. Metrics live in the process's default registry, one family per name.
"""

import logging
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import structlog
from prometheus_client import Counter, Gauge, Histogram
from structlog.typing import EventDict, Processor, WrappedLogger

_NOISY = ("httpx", "httpcore", "uvicorn.access", "asyncio", "stamina")


def configure_logging(
    service: str,
    *,
    level: str = "INFO",
    json: bool | None = None,
    replica: str | None = None,
    rank: int | None = None,
) -> None:
    """Route structlog and stdlib logging to stderr; `json=None` means JSON unless a terminal."""
    _identity().clear()
    bind_process(service=service, replica=replica, rank=rank)
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _stamp,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_rendering(as_json)
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def bind_process(**ids: Any) -> None:
    """Put these on every record of the process from now on; None takes an id away.

    For what holds for the whole process, such as the job in progress. What holds for one task (a
    group) is bound with `structlog.contextvars.bound_contextvars`.
    """
    for name, value in ids.items():
        if value is None:
            _identity().pop(name, None)
        else:
            _identity()[name] = value


@cache
def _identity() -> dict[str, Any]:
    return {}


def _rendering(as_json: bool) -> list[Processor]:
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if not as_json:
        return [clean, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [
        clean,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]


def _stamp(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key, value in _identity().items():
        event.setdefault(key, value)
    return event


@cache
def counter(
    name: str, documentation: str, labels: Sequence[str] = (), values: Sequence[str] = ()
) -> Counter:
    """The process's counter of that name; the name ends in `_total`. Known values of its one label
    are told from 0 on: the first increase of one that was not there shows in no rate."""
    made = Counter(name, documentation, labels)
    for value in values:
        made.labels(value)
    return made


@cache
def gauge(name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, documentation, labels)


@cache
def histogram(
    name: str,
    documentation: str,
    labels: Sequence[str] = (),
    buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
) -> Histogram:
    """Durations in seconds, named `*_seconds`."""
    return Histogram(name, documentation, labels, buckets=buckets)


def note_backlog(stream: str, number: int) -> None:
    """`stream_backlog{stream}`: messages of a work stream that are not finished yet."""
    gauge("stream_backlog", "Messages not finished yet.", ("stream",)).labels(stream).set(number)


def now_s() -> float:
    """Wall clock in seconds since the epoch, as messages and events carry it."""
    return time.time()
