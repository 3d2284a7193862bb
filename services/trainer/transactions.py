"""One update of one server: begin, poll until it has staged everything, commit, or abort."""

import asyncio
import contextlib
import time
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from shared.errors import DeadlineExceeded, HttpFailed, TandemError, WeightsCorrupt
from shared.http import HttpClient
from shared.weights.protocol import BeginUpdate, CommitResult, CommitUpdate, UpdateStatus

M = TypeVar("M", bound=BaseModel)
POLL_S = 0.05
CALL_S = 10.0
REFUSED = 500
GATEWAY_TIMEOUT = 504  # the server itself waited in vain

log = structlog.get_logger()


class UpdateFailed(TandemError):
    """A server said that an update cannot be applied, or nothing that we understand."""


class NotStaged(UpdateFailed):
    """Sources out of reach, no room, a deadline, an abort: nothing speaks against the version."""


class _Info(BaseModel):
    job_id: str | None = None
    policy_version: int | None = None
    effective_checksum: str | None = None


class Transaction:
    """Every method may raise `HttpFailed`, `UpdateFailed` or `DeadlineExceeded`."""

    def __init__(self, http: HttpClient, *, server_url: str, deadline_s: float) -> None:
        self._http = http
        self._url = server_url
        self._deadline_s = deadline_s

    async def serves_already(self, job_id: str, version: int) -> bool:
        """The registry lags; the server itself knows."""
        answer = await self._http.get(f"{self._url}/v1/info", timeout_s=CALL_S)
        info = _read(_Info, answer)
        return info.policy_version == version and info.job_id in (None, job_id)

    async def stage(self, begin: BeginUpdate) -> UpdateStatus:
        """Have the server pull and verify the shards; its old version serves meanwhile."""
        ends_s = time.monotonic() + self._deadline_s
        updates = f"{self._url}/v1/weights/updates"
        body = begin.model_dump(mode="json")
        answer = await self._http.post(updates, body, timeout_s=CALL_S, idempotent=True)
        status = _read(UpdateStatus, answer)
        while status.state not in ("staged", "active"):
            if status.state in ("failed", "aborted"):
                kind = UpdateFailed if status.is_wrong else NotStaged
                raise kind(f"staging {status.state}: {status.error}")
            if time.monotonic() > ends_s:
                progress = f"{status.staged_bytes} of {status.total_bytes} bytes"
                what = f"{self._url} to stage version {begin.version} ({progress})"
                raise DeadlineExceeded(what, self._deadline_s)
            await asyncio.sleep(POLL_S)
            answer = await self._http.get(f"{updates}/{begin.version}", timeout_s=CALL_S)
            status = _read(UpdateStatus, answer)
        return status

    async def commit(self, version: int, commit: CommitUpdate) -> CommitResult:
        """Activate what is staged; on any error of the server the previous version serves.

        An answer that is lost is asked for again: a commit that is repeated answers as the first.
        Where that is lost, too, nobody knows what the server serves before it tells.
        """
        try:
            answer = await self._prove("commit", version, commit, self._deadline_s)
        except (HttpFailed, DeadlineExceeded) as err:
            if isinstance(err, HttpFailed) and err.status is not None:
                raise
            log.warning("commit_asked_again", server=self._url, error=str(err))
            answer = await self._prove("commit", version, commit, CALL_S)
        result = _read(CommitResult, answer)
        if result.version != version:
            raise UpdateFailed(f"commit of {version} was answered for version {result.version}")
        if commit.effective_checksum not in (None, result.effective_checksum):
            raise UpdateFailed(
                f"commit of {version}: effective checksum {result.effective_checksum}, other "
                f"servers have {commit.effective_checksum}"
            )
        return result

    async def rehearse(self, version: int, commit: CommitUpdate) -> CommitResult:
        """A commit of the version that is served, without the switch."""
        return _read(CommitResult, await self._prove("rehearse", version, commit, self._deadline_s))

    async def _prove(self, how: str, version: int, commit: CommitUpdate, timeout_s: float) -> Any:
        url = f"{self._url}/v1/weights/updates/{version}/{how}"
        try:
            return await self._http.post(url, commit.model_dump(mode="json"), timeout_s=timeout_s)
        except HttpFailed as err:
            if err.is_late or err.status == GATEWAY_TIMEOUT:
                what = f"{self._url} to {how} version {version}"
                raise DeadlineExceeded(what, timeout_s) from err
            raise

    async def effective_checksum(self) -> str | None:
        """Of what the server serves, as it says."""
        answer = await self._http.get(f"{self._url}/v1/info", timeout_s=CALL_S)
        return _read(_Info, answer).effective_checksum

    async def abort(self, version: int) -> None:
        """Best effort: a server that does not hear it drops the update at its next one."""
        with contextlib.suppress(HttpFailed):
            url = f"{self._url}/v1/weights/updates/{version}"
            await self._http.request("DELETE", url, timeout_s=CALL_S)


def is_refusal(err: Exception) -> bool:
    """Whether the version was looked at and cannot be served: the server says so, or its files."""
    if isinstance(err, HttpFailed):
        return err.status == REFUSED
    return isinstance(err, UpdateFailed | WeightsCorrupt) and not isinstance(err, NotStaged)


def _read(model: type[M], answer: object) -> M:
    try:
        return model.model_validate(answer)
    except ValidationError as err:
        raise UpdateFailed(f"not an answer of a rollout server: {err.errors()[0]['msg']}") from err
