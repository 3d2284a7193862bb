"""What Tandem says to an SGLang server. A success code proves nothing: every answer is read.

No call that changes the server is repeated when its answer does not come: what such a server holds
is unknown, and whoever asked decides what becomes of it.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import structlog

from services.rollout.engine.sglang.spec import SINKS_DEPARTURE
from shared.errors import HttpFailed, TandemError
from shared.http import HttpClient

log = structlog.get_logger()

PauseMode = Literal["abort", "retract", "in_place"]

_CONTROL_S = 30.0
_IDLE_S = 10.0  # a sequence's answer comes a moment before its slot is free
CUT_SHORT = 499  # of what an abort found before SGLang's scheduler had it


class ServerRefused(TandemError):
    """The server answered, and the answer was no."""


class SGLangClient:
    """HTTP of one server. Raises `HttpFailed`, or `ServerRefused` with the server's own words."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.is_closed = False
        # Whoever asks owns the repeating. Sampling has connections of its own, as many as sequences
        # run: a pause must not wait for what it is to end.
        self._http = HttpClient(token=token, attempts=1)
        self._sampling = HttpClient(token=token, attempts=1, max_connections=None)

    async def close(self) -> None:
        self.is_closed = True
        await self._http.close()
        await self._sampling.close()

    async def info(self) -> dict[str, Any]:
        """Version, arguments and the class that is served."""
        answer = await self._ask("/server_info", timeout_s=_CONTROL_S)
        return dict(answer)

    async def endpoints(self) -> set[str]:
        """Paths of its OpenAPI document."""
        answer = await self._ask("/openapi.json", timeout_s=_CONTROL_S)
        return set(answer["paths"])

    async def label_served(self) -> str:
        """The version's name that its tokens carry."""
        answer = await self._ask("/model_info", timeout_s=_CONTROL_S)
        return str(answer["weight_version"])

    async def architectures(self) -> set[str]:
        """Classes of the model that is loaded, as its config names them."""
        answer = await self._ask("/model_info", timeout_s=_CONTROL_S)
        return {str(one) for one in answer.get("architectures") or ()}

    async def sinks_departure(self) -> float | None:
        """The largest |copy - attention sink| of the ranks that answer (the first of each group);
        None of a class of model that does not tell it, or of copies that are no numbers."""
        url = f"{self.url}/get_weights_by_name"
        body = {"name": SINKS_DEPARTURE}
        try:
            answer = await self._once_more(
                lambda: self._http.post(url, body, timeout_s=_CONTROL_S, idempotent=True)
            )
        except HttpFailed as err:
            if err.status not in (400, 404, 405):
                raise
            return None
        told = [one for each in answer for one in (each if isinstance(each, list) else [each])]
        return max(told) if told and all(isinstance(one, float | int) for one in told) else None

    async def ask_health(self, *, timeout_s: float) -> None:
        """HttpFailed unless the scheduler, not only HTTP, answers in time that it is well."""
        await self._ask("/health_generate", timeout_s=timeout_s)

    async def generate(self, body: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """One answer per sequence of `body["input_ids"]`."""
        answer = await self._sampling.post(f"{self.url}/generate", body, timeout_s=timeout_s)
        if not isinstance(answer, list) or len(answer) != len(body["input_ids"]):
            raise ServerRefused(f"/generate of {len(body['input_ids'])} gave {str(answer)[:300]}")
        return answer

    async def stream(
        self, body: dict[str, Any], *, timeout_s: float
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """The same answers as they grow: (which sequence, all that it has so far)."""
        url = f"{self.url}/generate"
        async for line in self._sampling.post_for_lines(
            url, body | {"stream": True}, timeout_s=timeout_s
        ):
            if line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            answer = json.loads(line.removeprefix("data: "))
            if error := answer.get("error"):
                if isinstance(error, dict) and error.get("code") == CUT_SHORT:
                    raise HttpFailed("POST", url, CUT_SHORT, str(error))
                raise ServerRefused(f"/generate: {str(error)[:300]}")
            yield int(answer.get("index", 0)), answer
        raise HttpFailed("POST", url, None, "the stream ended before its end was said")

    async def score(self, body: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """The same of a body that only asks for log-probabilities."""
        return await self.generate(body, timeout_s=timeout_s)

    async def generate_by_each(
        self, body: dict[str, Any], *, timeout_s: float
    ) -> list[list[dict[str, Any]]]:
        """The same by every server that there is, in one order."""
        return [await self.generate(body, timeout_s=timeout_s)]

    async def abort(self, request_id: str) -> None:
        """End one sequence; its answer comes with what it had."""
        await self._http.post(
            f"{self.url}/abort_request", {"rid": request_id}, timeout_s=_CONTROL_S, idempotent=True
        )

    async def abort_all(self, *, timeout_s: float) -> None:
        """The same for whatever runs there, or is about to."""
        url, body = f"{self.url}/abort_request", {"abort_all": True}
        await self._http.post(url, body, timeout_s=timeout_s, idempotent=True)

    async def pause(self, mode: PauseMode) -> None:
        await self._control("/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        await self._control("/continue_generation", {})

    async def flush(self) -> None:
        """Drop every cached prefix, when the last sequence has ended; 400 if one goes on."""
        path = f"/flush_cache?timeout={_IDLE_S:g}"
        await self._http.post(f"{self.url}{path}", {}, timeout_s=_CONTROL_S, idempotent=True)

    async def label(self, policy_version: int) -> None:
        """Name what is served; sampled tokens carry it."""
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self.change("/update_weight_version", body, timeout_s=_CONTROL_S)

    async def change(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """A call that changes weights. `ServerRefused` unless the answer says that it did."""
        try:
            answer = await self._http.post(f"{self.url}{path}", body, timeout_s=timeout_s)
        except HttpFailed as err:
            if err.status is None:
                raise
            raise ServerRefused(f"{path}: {err}") from err
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerRefused(f"{path}: {str(answer)[:500]}")

    async def _ask(self, path: str, *, timeout_s: float) -> Any:
        url = f"{self.url}{path}"
        return await self._once_more(lambda: self._http.get(url, timeout_s=timeout_s))

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        url = f"{self.url}{path}"
        await self._once_more(lambda: self._http.post(url, body, timeout_s=_CONTROL_S))

    async def _once_more(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """A question, or what is the same done twice. A broken connection says nothing of the
        server: it is asked once more."""
        try:
            return await ask()
        except HttpFailed as err:
            if err.status is not None or err.is_late or self.is_closed:
                raise
            log.info("sglang_asked_again", error=str(err))
        return await ask()
