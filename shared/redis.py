"""The one way to reach the broker.

The client itself retries with jitter until `patience_s` is over, so a broker that restarts is
invisible to its users and nothing retries a retry. A consumer blocks for less than the socket
timeout: otherwise a quiet stream looks like a dead broker.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, RedisError

log = structlog.get_logger()
T = TypeVar("T")

SOCKET_TIMEOUT_S = 10.0
MAX_BLOCK_S = 5.0
_UNLIMITED = 1_000_000  # the deadline ends the retries, not their number


def create_redis(url: str, *, process: str, patience_s: float = 60.0) -> Redis:
    """A client that waits out a broker's absence of `patience_s`; `process` is its client name."""
    return Redis.from_url(
        url,
        client_name=process,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        socket_keepalive=True,
        retry=PatientRetry(patience_s),
    )


def broker_trouble(redis: Redis) -> str | None:
    """Why the broker cannot be used right now; None when the last exchange succeeded."""
    retry: Any = redis.get_retry()
    if not isinstance(retry, PatientRetry) or retry.away_since is None:
        return None
    return f"broker unreachable for {time.monotonic() - retry.away_since:.0f} s"


class PatientRetry(Retry):
    """redis-py's retry, bounded by time, which remembers since when the broker is away."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(ExponentialWithJitterBackoff(base=0.05, cap=1.0), _UNLIMITED)
        self.patience_s = patience_s
        self.away_since: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PatientRetry":
        """Connections copy their policy; they share this one, for its memory."""
        return self

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        began = time.monotonic()
        failures = 0
        while True:
            try:
                result = await do()
            except self._supported_errors as error:
                refused = is_retryable is not None and not is_retryable(error)
                if refused or isinstance(error, AuthenticationError):
                    raise
                failures += 1
                self._note_away(error)
                await (fail(error, failures) if with_failure_count else fail(error))
                if time.monotonic() - began > self.patience_s:
                    raise
                await asyncio.sleep(self._backoff.compute(failures))
            else:
                if result is not None:  # connecting proves nothing: a stalled broker still accepts
                    self._note_back()
                return result

    def _note_away(self, error: RedisError) -> None:
        if self.away_since is None:
            self.away_since = time.monotonic()
            log.warning("broker_unreachable", error=str(error), patience_s=self.patience_s)

    def _note_back(self) -> None:
        if self.away_since is not None:
            log.info("broker_back", away_s=round(time.monotonic() - self.away_since, 1))
            self.away_since = None
