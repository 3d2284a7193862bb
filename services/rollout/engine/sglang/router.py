"""Several servers behind SGLang's router: it spreads what is sampled, we change each server itself.

The router forwards a sequence to one of its workers and nothing else of use: an update, a pause, a
flush or a label that it forwarded would reach one server of many. So those go to every worker that
it names, and a version is proven on every one. A worker that it has since found healthy makes the
whole unwell, so that all are loaded; what was sampled there by then is lost, and sampled again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from services.rollout.engine.sglang.client import PauseMode, ServerRefused, SGLangClient
from services.rollout.engine.sglang.generation import SAME_SCORES, check_versions, single_bodies
from shared.errors import HttpFailed
from shared.http import HttpClient

_ASK_S = 20.0
T = TypeVar("T")


async def client_of(url: str, token: str | None) -> SGLangClient:
    """Of a server, or of a router with all its workers. HttpFailed when nobody answers."""
    async with HttpClient(token=token, attempts=1) as http:
        try:
            answer = await http.get(f"{url.rstrip('/')}/workers", timeout_s=_ASK_S)
        except HttpFailed as err:
            if err.status not in (404, 405):
                raise
            return SGLangClient(url, token=token)
    urls = _healthy(answer)
    if not urls:
        raise ServerRefused(f"the router at {url} has no healthy worker")
    return RoutedClient(url, urls, token=token)


def _healthy(answer: dict[str, Any]) -> list[str]:
    workers = [worker for worker in answer["workers"] if worker.get("is_healthy")]
    return [str(worker["url"]).rstrip("/") for worker in workers]


class RoutedClient(SGLangClient):
    """One client of many servers. A call to all of them fails when one fails, after all ended."""

    def __init__(self, url: str, workers: list[str], *, token: str | None = None) -> None:
        super().__init__(url, token=token)
        self.workers = [SGLangClient(one, token=token) for one in sorted(workers)]
        self._version: int | None = None  # that every worker was told

    async def close(self) -> None:
        await super().close()
        await self._all(lambda worker: worker.close())

    async def info(self) -> dict[str, Any]:
        """Of the first worker; ServerRefused when another runs another version."""
        found = await self._all(lambda worker: worker.info())
        versions = {str(one.get("version")) for one in found}
        if len(versions) > 1:
            raise ServerRefused(f"workers of {self.url} run SGLang {sorted(versions)}")
        return found[0]

    async def endpoints(self) -> set[str]:
        """What every worker has."""
        return set.intersection(*await self._all(lambda worker: worker.endpoints()))

    async def architectures(self) -> set[str]:
        """Of all workers."""
        return set.union(*await self._all(lambda worker: worker.architectures()))

    async def label_served(self) -> str:
        """The one that all carry, or all that there are."""
        found = await self._all(lambda worker: worker.label_served())
        return ", ".join(sorted(set(found)))

    async def sinks_departure(self) -> float | None:
        """The largest of all; None where a worker does not tell."""
        found = await self._all(lambda worker: worker.sinks_departure())
        told = [one for one in found if one is not None]
        return max(told) if len(told) == len(found) else None

    async def ask_health(self, *, timeout_s: float) -> None:
        """Of every worker; ServerRefused where the router has other ones."""
        urls = _healthy(await self._ask("/workers", timeout_s=timeout_s))
        if others := set(urls) - {worker.url for worker in self.workers}:
            raise ServerRefused(f"{self.url} has more workers: {', '.join(sorted(others))}")
        await self._all(lambda worker: worker.ask_health(timeout_s=timeout_s))

    async def generate(self, body: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """Each sequence is a call of its own: the router takes no others, and may spread them."""
        url = f"{self.url}/generate"
        calls = [self._sampling.post(url, one, timeout_s=timeout_s) for one in _one_by_one(body)]
        # A router may wrap the answer of one sequence in a list of one.
        answers = [one[0] if isinstance(one, list) else one for one in await _each(calls)]
        try:
            for one in answers:
                meta = one.get("meta_info") if isinstance(one, dict) else None
                if self._version is not None and isinstance(meta, dict):
                    check_versions(meta, self._version)
        except ServerRefused as err:
            raise HttpFailed("POST", url, None, f"of a worker that is not loaded: {err}") from err
        return answers

    async def stream(
        self, body: dict[str, Any], *, timeout_s: float
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Whole answers: the calls are one sequence long, and each is lost alone."""
        for index, answer in enumerate(await self.generate(body, timeout_s=timeout_s)):
            yield index, answer

    async def score(self, body: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """By every worker; ServerRefused names the one that does not agree with the first."""
        found = await self._all(lambda worker: worker.score(body, timeout_s=timeout_s))
        first = _scores(found[0])
        for worker, answers in zip(self.workers[1:], found[1:], strict=True):
            delta = float(np.abs(_scores(answers) - first).mean())
            if not delta <= SAME_SCORES:
                raise ServerRefused(
                    f"{worker.url} and {self.workers[0].url} score one version differently: "
                    f"mean |delta log p| {delta:.3g}"
                )
        return found[0]

    async def generate_by_each(
        self, body: dict[str, Any], *, timeout_s: float
    ) -> list[list[dict[str, Any]]]:
        return await self._all(lambda worker: worker.generate(body, timeout_s=timeout_s))

    async def abort(self, request_id: str) -> None:
        await self._all(lambda worker: worker.abort(request_id))

    async def abort_all(self, *, timeout_s: float) -> None:
        await self._all(lambda worker: worker.abort_all(timeout_s=timeout_s))

    async def pause(self, mode: PauseMode) -> None:
        await self._all(lambda worker: worker.pause(mode))

    async def go_on(self) -> None:
        await self._all(lambda worker: worker.go_on())

    async def flush(self) -> None:
        await self._all(lambda worker: worker.flush())

    async def label(self, policy_version: int) -> None:
        await self._all(lambda worker: worker.label(policy_version))
        self._version = policy_version

    async def change(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        await self._all(lambda worker: worker.change(path, body, timeout_s=timeout_s))

    async def _all(self, ask: Callable[[SGLangClient], Awaitable[T]]) -> list[T]:
        return await _each([ask(worker) for worker in self.workers])


async def _each(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All answers, once every call has ended; the first failure is raised then."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failed = next((one for one in answers if isinstance(one, BaseException)), None)
    if failed is not None:
        raise failed
    return [one for one in answers if not isinstance(one, BaseException)]


def _one_by_one(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The body of a batch as bodies of one sequence, without lists around what is one."""
    return [
        {key: value[0] if isinstance(value, list) else value for key, value in one.items()}
        for one in single_bodies(body)
    ]


def _scores(answers: list[dict[str, Any]]) -> np.ndarray:
    pairs = (pair for one in answers for pair in one["meta_info"]["input_token_logprobs"][1:])
    return np.array([np.nan if pair[0] is None else pair[0] for pair in pairs], np.float64)
