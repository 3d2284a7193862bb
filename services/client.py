"""A small typed client of the trainer's REST API; the CLI is built on it.

The trainer may be away for a while (it is restarted when it dies): requests are repeated and event
streams taken up where they broke off, until `patience_s` have passed without an answer.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import httpx

from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.job_answers import (
    JobStatus,
    KeptVersions,
    ProfileStatus,
    RunOverview,
    ServerList,
    Submitted,
)
from shared.messages import Event
from shared.refusals import sentences
from shared.registry import Replica

Command = Literal["cancel", "pause", "resume"]

_RECONNECT_S = 0.5
_SILENCE_S = 45.0  # an open stream sends a comment every ten seconds
_RETRY_STEP_S = 2.0  # what the HTTP client waits at most between two attempts
_REPORT_S = 60.0  # drawing a report anew takes a core for seconds


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    line: int  # of the run's events.jsonl, from 1
    event: Event


class JobRefused(TandemError):
    """The trainer does not accept the job; `problems` has one sentence per wrong key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class NoSuchJob(TandemError):
    pass


class TandemClient:
    def __init__(
        self,
        trainer_url: str,
        *,
        patience_s: float = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = trainer_url.rstrip("/")
        self._patience_s = patience_s
        attempts = max(1, round(patience_s / _RETRY_STEP_S))
        self._http = HttpClient(attempts=attempts, transport=transport)
        self._stream = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENCE_S, connect=5.0), transport=transport
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def patience_s(self) -> float:
        return self._patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._stream.aclose()

    async def submit(self, document: Mapping[str, Any]) -> Submitted:
        """Raises `JobRefused` with every wrong key.

        The key makes asking again safe when an answer got lost: it is one job all the same.
        """
        key = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            answer = await self._http.post(
                f"{self._url}/v1/jobs", dict(document), headers=key, idempotent=True
            )
        except HttpFailed as err:
            if err.status == 422:
                raise JobRefused(sentences(err.body)) from err
            raise
        return Submitted.model_validate(answer)

    async def jobs(self) -> list[JobStatus]:
        """Oldest first."""
        answer = await self._http.get(f"{self._url}/v1/jobs")
        return [JobStatus.model_validate(job) for job in answer["jobs"]]

    async def job(self, job_id: str) -> JobStatus:
        return JobStatus.model_validate(await self._of_job("GET", job_id))

    async def command(
        self, job_id: str, command: Command, *, changes: Mapping[str, Any] | None = None
    ) -> JobStatus:
        """`changes` of a resume are parts of the job's document; `JobRefused` says what cannot
        change."""
        try:
            answer = await self._of_job("POST", job_id, f"/{command}", dict(changes or {}) or None)
        except HttpFailed as err:
            if err.status == 422:
                raise JobRefused(sentences(err.body)) from err
            raise
        return JobStatus.model_validate(answer)

    async def weights(self, job_id: str) -> KeptVersions:
        """Of a job in progress; `NoSuchJob` says if it is not."""
        return await self._weights("GET", f"/v1/jobs/{job_id}/weights")

    async def roll_back(self, job_id: str, version: int) -> KeptVersions:
        """`NoSuchJob` says if the job is not in progress or the version is not kept."""
        return await self._weights("POST", f"/v1/jobs/{job_id}/weights/rollback", {"to": version})

    async def _weights(self, method: str, path: str, body: Any = None) -> KeptVersions:
        try:
            answer = await self._http.request(
                method, f"{self._url}{path}", json=body, idempotent=True
            )
        except HttpFailed as err:
            if err.status == 404:
                raise NoSuchJob("; ".join(sentences(err.body))) from err
            raise
        return KeptVersions.model_validate(answer)

    async def summary(self, job_id: str) -> dict[str, Any]:
        """summary.json as it is now; `HttpFailed` with 404 before the job has begun."""
        url = f"{self._url}/v1/jobs/{job_id}/summary"
        return dict(await self._http.get(url, timeout_s=_REPORT_S))

    async def num_events(self, job_id: str) -> int:
        """Lines of the job's events so far."""
        return (await self.metrics(job_id)).after

    async def metrics(self, job_id: str) -> RunOverview:
        """The run for a screen: thinned steps, evaluations, last updates and events, counts."""
        return RunOverview.model_validate(await self._of_job("GET", job_id, "/metrics"))

    async def ask_profile(self, job_id: str, steps: int) -> ProfileStatus:
        """`HttpFailed` with 409 says why the job cannot be profiled now."""
        url = f"{self._url}/v1/jobs/{job_id}/profiles"
        return ProfileStatus.model_validate(await self._http.post(url, {"steps": steps}))

    async def profile(self, job_id: str, profile_id: str) -> ProfileStatus:
        url = f"{self._url}/v1/jobs/{job_id}/profiles/{profile_id}"
        return ProfileStatus.model_validate(await self._http.get(url))

    async def profile_trace(self, job_id: str, profile_id: str) -> dict[str, Any]:
        """The time line as a Chrome trace."""
        return dict(
            await self._http.get(f"{self._url}/v1/jobs/{job_id}/profiles/{profile_id}/trace")
        )

    async def servers(self) -> list[Replica]:
        answer = await self._http.get(f"{self._url}/v1/servers")
        return ServerList.model_validate(answer).servers

    async def events(
        self, job_id: str, *, after: int = 0, on_silence: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[NumberedEvent, None]:
        """The job's events from line `after` + 1 on, then live, until it has ended or is paused.

        `on_silence` is called when the trainer stops answering, once each time. Raises
        `DeadlineExceeded` once it has been silent for `patience_s`.
        """
        url = f"{self._url}/v1/jobs/{job_id}/events"
        heard_s, is_silent = time.monotonic(), False
        while True:
            try:
                async for message in self._messages(url, after):
                    heard_s, is_silent = time.monotonic(), False
                    if message.kind == "end":
                        return
                    if message.kind == "message" and message.line > after:
                        after = message.line
                        yield NumberedEvent(after, Event.model_validate_json(message.data))
            except httpx.TransportError:  # it is asked again below, within the deadline
                if not is_silent:
                    on_silence()
                is_silent = True
            except HttpFailed as err:
                if err.status == 404:
                    raise NoSuchJob(f"the trainer knows no job {job_id}") from err
                if err.status is not None and err.status < 500:
                    raise
            if time.monotonic() - heard_s > self._patience_s:
                raise DeadlineExceeded(f"{url} to answer", self._patience_s)
            await asyncio.sleep(_RECONNECT_S)

    async def _messages(self, url: str, after: int) -> AsyncIterator["_Message"]:
        async with self._stream.stream("GET", url, params={"after": after}) as answer:
            if answer.is_error:
                body = (await answer.aread()).decode(errors="replace")
                raise HttpFailed("GET", url, answer.status_code, body)
            message = _Message()
            async for line in answer.aiter_lines():
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if not line:
                    yield message
                    message = _Message()
                elif name == "id":
                    message.line = int(value)
                elif name == "event":
                    message.kind = value
                elif name == "data":
                    message.data += value

    async def _of_job(self, method: str, job_id: str, path: str = "", body: Any = None) -> Any:
        try:
            return await self._http.request(
                method, f"{self._url}/v1/jobs/{job_id}{path}", json=body, idempotent=True
            )
        except HttpFailed as err:
            if err.status == 404:
                raise NoSuchJob(f"the trainer knows no job {job_id}") from err
            raise


@dataclass(slots=True)
class _Message:
    """One server-sent event; a comment alone ends as one without data."""

    kind: str = "message"
    line: int = 0
    data: str = ""
