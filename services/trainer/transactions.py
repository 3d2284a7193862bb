"""One update of one server: begin, poll until it has staged everything, commit, or abort."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from shared.errors import DeadlineExceeded, HttpFailed, TandemError, WeightsCorrupt
from shared.http import HttpClient
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, UpdateStatus

M = TypeVar("M", bound=BaseModel)
POLL_S = 0.05
CALL_S = 10.0
OTHER_VALUES = 412
REFUSED = 500
GATEWAY_TIMEOUT = 504  # the server itself waited in vain

log = structlog.get_logger()


class UpdateFailed(TandemError):
    """A server said that an update cannot be applied."""


class NotStaged(UpdateFailed):
    """Sources out of reach, no room, a deadline, an abort: nothing speaks against the version."""


class NotUnderstood(UpdateFailed):
    """A server answered something that means nothing: that says nothing of the version."""


class ValuesDiffer(UpdateFailed):
    """A server comes to another effective checksum than `expected`; `said` is None where it did
    not take the version for that. Which of the two is right it cannot tell."""

    def __init__(self, text: str, *, said: str | None, expected: str) -> None:
        super().__init__(text)
        self.said, self.expected = said, expected


class _Info(BaseModel):
    job_id: str | None = None
    policy_version: int | None = None
    effective_checksum: str | None = None


class Transaction:
    """Every method may raise `HttpFailed`, `UpdateFailed` or `DeadlineExceeded`.

    `deadline_s` is for all of them together, and counts only while this server is waited for.
    """

    def __init__(self, http: HttpClient, *, server_url: str, deadline_s: float) -> None:
        self._http = http
        self._url = server_url
        self._deadline_s = deadline_s
        self._left_s = deadline_s
        self._waits_for = ""

    async def serves_already(self, job_id: str, version: int) -> bool:
        """The registry lags; the server itself knows."""
        async with self._clock("say what it serves"):
            answer = await self._http.get(f"{self._url}/v1/info", timeout_s=CALL_S)
        info = _read(_Info, answer)
        return info.policy_version == version and info.job_id in (None, job_id)

    async def stage(self, begin: BeginUpdate) -> UpdateStatus:
        """Have the server pull and verify the shards; its old version serves meanwhile."""
        updates = f"{self._url}/v1/weights/updates"
        body, what = begin.model_dump(mode="json"), f"stage version {begin.version}"
        async with self._clock(what):
            answer = await self._http.post(updates, body, timeout_s=CALL_S, idempotent=True)
            status = _read(UpdateStatus, answer)
            while status.state not in ("staged", "active"):
                if status.state in ("failed", "aborted"):
                    kind = UpdateFailed if status.is_wrong else NotStaged
                    raise kind(f"staging {status.state}: {status.error}")
                self._waits_for = f"{what} ({status.staged_bytes} of {status.total_bytes} bytes)"
                await asyncio.sleep(POLL_S)
                answer = await self._http.get(f"{updates}/{begin.version}", timeout_s=CALL_S)
                status = _read(UpdateStatus, answer)
        return status

    async def commit(self, version: int, commit: CommitUpdate) -> CommitResult:
        """Activate what is staged; on any error of the server the previous version serves.

        An answer that is lost is asked for again: a commit that is repeated answers as the first.
        Where that is lost, too, nobody knows what the server serves before it tells.
        `ValuesDiffer` where it refuses the version for the checksum that is expected.
        """
        async with self._clock(f"commit version {version}"):
            try:
                answer = await self._prove("commit", version, commit)
            except HttpFailed as err:
                if not _is_lost(err):
                    raise
                log.warning("commit_asked_again", server=self._url, error=str(err))
                answer = await self._prove("commit", version, commit)
        result = _read(CommitResult, answer)
        if result.version != version:
            raise NotUnderstood(f"commit of {version} was answered for version {result.version}")
        return result

    async def rehearse(self, version: int, commit: CommitUpdate) -> CommitResult:
        """A commit of the version that is served, without the switch."""
        async with self._clock(f"rehearse version {version}"):
            return _read(CommitResult, await self._prove("rehearse", version, commit))

    async def _prove(self, how: str, version: int, commit: CommitUpdate) -> Any:
        url = f"{self._url}/v1/weights/updates/{version}/{how}"
        body, expected = commit.model_dump(mode="json"), commit.effective_checksum
        try:
            return await self._http.post(url, body, timeout_s=self._deadline_s)
        except HttpFailed as err:
            if err.status == OTHER_VALUES and expected is not None:
                raise ValuesDiffer(str(err), said=None, expected=expected) from err
            raise

    @asynccontextmanager
    async def _clock(self, what: str) -> AsyncIterator[None]:
        """The server's time: what it is waited for in this block, of all that is left to it."""
        self._waits_for, began_s, before_s = what, time.monotonic(), self._left_s
        try:
            async with asyncio.timeout(before_s):
                yield
        except (TimeoutError, HttpFailed) as err:
            if isinstance(err, HttpFailed) and not (err.is_late or err.status == GATEWAY_TIMEOUT):
                raise
            waited = f"{self._url} to {self._waits_for}"
            if (spent_s := round(self._deadline_s - before_s, 1)) > 0:
                waited += f"; of its {self._deadline_s:g} s for an update {spent_s:g} had gone"
            raise DeadlineExceeded(waited, round(time.monotonic() - began_s, 1)) from err
        finally:
            self._left_s = before_s - (time.monotonic() - began_s)

    async def effective_checksum(self) -> str | None:
        """Of what the server serves, as it says."""
        answer = await self._http.get(f"{self._url}/v1/info", timeout_s=CALL_S)
        return _read(_Info, answer).effective_checksum

    async def abort(self, version: int) -> None:
        """Best effort: a server that does not hear it drops the update at its next one."""
        with suppress(HttpFailed):
            url = f"{self._url}/v1/weights/updates/{version}"
            await self._http.request("DELETE", url, timeout_s=CALL_S)


def _is_lost(err: HttpFailed) -> bool:
    return err.status in (None, GATEWAY_TIMEOUT)


def is_refusal(err: Exception) -> bool:
    """Whether the version was looked at and cannot be served: the server says so, or its files."""
    if isinstance(err, HttpFailed):
        return err.status == REFUSED
    blameless = NotStaged | NotUnderstood
    return isinstance(err, UpdateFailed | WeightsCorrupt) and not isinstance(err, blameless)


def _read(model: type[M], answer: object) -> M:
    try:
        return model.model_validate(answer)
    except ValidationError as err:
        raise NotUnderstood(f"not an answer of a rollout server: {err.errors()[0]['msg']}") from err
