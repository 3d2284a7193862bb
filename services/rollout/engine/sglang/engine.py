"""An SGLang server behind the engine's channel: the same operations, the same promises.

    generate ──gate──> /generate … (cut short by an update: back to the gate, then on)
    activate: gate closed, running sequences brought home, weights loaded (dialect x transport),
              caches flushed, probed by log-probabilities, labelled, gate opened
         └── anything else ──> the last good version is loaded back and proven, or a fresh server
                               of it is started; a half-loaded server never serves

The gate is ours, so that nothing is sampled between the load and the proof.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import structlog

from services.rollout.engine.checks import check_request, check_routes, check_tokens
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.sglang.asked import Asked
from services.rollout.engine.sglang.client import CUT_SHORT, ServerRefused
from services.rollout.engine.sglang.generation import (
    Sequence,
    has_routes,
    interrupted,
    is_complete,
    request_body,
    score_body,
    scores_of,
    single_bodies,
    was_queued,
)
from services.rollout.engine.sglang.routes import Tables, joined, routes_of
from services.rollout.engine.sglang.server import Server
from shared.errors import DeadlineExceeded, HttpFailed, Retryable
from shared.tasks import end, first_of, wait_for_event

log = structlog.get_logger()

_HOME_S = 60.0  # for running sequences to come back when told to
_PAUSED_S = 20.0  # the same where somebody waits for the pause
_CUT_S = 0.5  # to tell a server to cut short what runs, and again for that to end
_AWAY_S = (0.1, 1.0)  # first and longest: then a call waits that reached the server after the pause
_CALL_S = 1800.0
_ABORT_AGAIN_S = 1.0
_SCORE_TRIES = 8
_REFUSED = (400, 413, 422)  # the request itself, whoever is asked


class SGLangEngine:
    """Generation and scoring of the version that is served; `versions` replaces it."""

    def __init__(self, spec: EngineSpec, server: Server) -> None:
        self.spec = spec
        self.server = server
        self.policy_version: int | None = None
        self.tokens_sampled = 0
        self.paused = False
        self.tables: Tables = {}  # of the hash layers that are served
        self._gate = asyncio.Event()
        self._is_held = False  # an update or a recovery is at it: nobody else opens the gate
        self._calls: dict[str, list[Sequence]] = {}  # under way on the server
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting = 0
        self._asked: dict[str, Asked] = {}  # requests that go on, by id
        self._health: asyncio.Task[bool] | None = None
        self._hand_over = False  # an update that gives partial completions back
        self._numbers = itertools.count()

    @property
    def num_running(self) -> int:
        return sum(len(sequences) for sequences in self._calls.values())

    @property
    def num_waiting(self) -> int:
        return self._waiting

    async def generate(self, request: GroupRequest) -> list[Completion]:
        """All completions; those that an abort or an abort-mode update cut short say so."""
        check_request(request, self.spec.arch, self.spec.context_length)
        if request.with_routes:
            check_routes(request)
        self._require(request.policy_version)
        sequences = [Sequence.of(i, request.partial.get(i)) for i in request.samples]
        spare = max(0, len(sequences) - (request.enough or len(sequences)))
        open_, asked = sequences, Asked(request)
        self._asked[request.request_id] = asked
        try:
            while len(open_) > spare and await self._pass_gate(len(open_), asked.ended):
                await self._sample(asked, open_, enough=len(open_) - spare)
                open_ = [one for one in open_ if one.finish_reason == "abort"]
                if asked.ended.is_set() or self._hand_over:
                    break
                asked.check_served()
        finally:
            del self._asked[request.request_id]
        return [one.completion() for one in sequences]

    async def score(
        self, sequences: list[list[int]], temperature: float, policy_version: int | None
    ) -> tuple[int, list[np.ndarray]]:
        """The version that scored, and FP32 log-probabilities of tokens 1.. of each sequence."""
        for number, sequence in enumerate(sequences):
            arch, limit = self.spec.arch, self.spec.context_length
            check_tokens(np.array(sequence), arch, limit, f"sequence {number}")
        if temperature != 1.0:
            raise ValueError(f"an SGLang server scores at temperature 1, not {temperature:g}")
        for _ in range(_SCORE_TRIES):
            await self._pass_gate(0, asyncio.Event())
            version = self._require(policy_version)
            call_id = f"score-{next(self._numbers)}"
            try:
                with self._under_way(call_id, []):  # an update waits for it, and is not scored
                    answers = await self._score_answers(sequences, call_id)
            except HttpFailed as err:
                if err.status != CUT_SHORT:
                    raise
                continue
            if all(is_complete(one, []) for one in answers):
                return version, self._scores(sequences, answers)
        raise ServerRefused(f"{_SCORE_TRIES} calls in a row for scores were cut short")

    async def score_now(
        self, sequences: list[list[int]], *, timeout_s: float = _CALL_S
    ) -> list[np.ndarray]:
        """The same of whatever the server holds at this moment."""
        call_id = f"score-{next(self._numbers)}"
        answers = await self._score_answers(sequences, call_id, timeout_s=timeout_s)
        return self._scores(sequences, answers)

    async def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; whoever waits for it gets what it has."""
        if request_id in self._asked:
            self._asked[request_id].ended.set()

    @asynccontextmanager
    async def quiet(self, *, hand_over: bool, limit_s: float) -> AsyncIterator[None]:
        """Nothing of ours runs on the server, and nothing starts, until this is left.

        The server is paused when this begins and goes on when it is left, however that comes.
        DeadlineExceeded when what runs did not come back in `limit_s`.
        """
        was_held = self._is_held
        self.shut_gate()
        self._hand_over = hand_over
        try:
            await self._bring_home(min(limit_s, _HOME_S))
            self._hand_over = False
            yield
        finally:
            self._hand_over = False
            await self._leave_going()
            self._is_held = was_held

    def shut_gate(self) -> None:
        """Let no call start until `open_gate`."""
        self._is_held = True
        self._gate.clear()

    async def close_gate(self) -> None:
        """Let no call start, and wait until all have come back or failed."""
        self.shut_gate()
        if not await wait_for_event(self._idle, _HOME_S):
            raise self._not_home(_HOME_S)

    def open_gate(self) -> None:
        """Whoever shut it is done; a pause is still a pause."""
        self._is_held = False
        self._open_if_free()

    async def pause(self) -> None:
        """Stop sampling until `go_on`; what runs keeps its tokens. Goes on if that fails."""
        self.paused = True
        try:
            async with self.quiet(hand_over=False, limit_s=_PAUSED_S):
                pass
        except BaseException:
            self.go_on()
            raise

    def go_on(self) -> None:
        self.paused = False
        self._open_if_free()

    def _open_if_free(self) -> None:
        if self.policy_version is not None and not (self.paused or self._is_held):
            self._gate.set()

    async def _bring_home(self, limit_s: float) -> None:
        """Pause the server until all calls have come back.

        SGLang's pause cuts short what runs, and looks a second later whether it has ended (0.5.17,
        TokenizerManager.pause_generation): it is asked for once that is done.
        A call that reaches it after the pause waits there, where no abort finds it, for the server
        to go on. So it is let in, under the weights that it asked for, and then cut short.
        """
        client, ends_s = self.server.client, time.monotonic() + limit_s
        patience_s, longest_s = _AWAY_S
        if self._calls:
            await self._cut_short()
        await client.pause("abort")
        while not await wait_for_event(self._idle, patience_s):
            if time.monotonic() > ends_s:
                raise self._not_home(limit_s)
            patience_s = min(2 * patience_s, longest_s)
            log.info("sglang_calls_are_late", calls=len(self._calls))
            await client.go_on()
            await client.pause("abort")

    async def _cut_short(self) -> None:
        try:
            await self.server.client.abort_all(timeout_s=_CUT_S)
        except HttpFailed as err:
            log.warning("sglang_abort_lost", error=str(err))  # the pause does it, too
        else:
            await wait_for_event(self._idle, _CUT_S)

    async def _leave_going(self) -> None:
        """A server that stayed paused would answer nothing, its own health least of all."""
        client = self.server.client
        if client.is_closed:
            return
        try:
            await client.go_on()
        except HttpFailed as err:
            log.warning("sglang_does_not_go_on", error=str(err))  # the guard finds it unwell

    def _not_home(self, limit_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{len(self._calls)} calls to come back from SGLang", limit_s)

    def _require(self, policy_version: int | None) -> int:
        held = self.policy_version
        if held is None:
            raise Retryable(f"policy version {policy_version} is not held; no weights are loaded")
        if policy_version not in (None, held):
            raise Retryable(f"policy version {policy_version} is not held; version {held} is")
        return held

    async def _pass_gate(self, num_sequences: int, ended: asyncio.Event) -> bool:
        """Wait until calls may start; False when the request has `ended` before."""
        self._waiting += num_sequences
        try:
            # It may be shut again before a waiter has its turn.
            while not (self._gate.is_set() or ended.is_set()):
                await first_of(self._gate, ended)
        finally:
            self._waiting -= num_sequences
        return not ended.is_set()

    async def _sample(self, asked: Asked, sequences: list[Sequence], *, enough: int) -> None:
        """One call; the sequences are extended by what it brought, and ended once `enough` are
        complete."""
        version, request = self._require(None), asked.request
        call_id = f"{request.request_id}/{next(self._numbers)}"
        body = request_body(request, sequences, call_id=call_id, spec=self.spec)
        num_tokens = 0
        with self._under_way(call_id, sequences):
            answers = await self._answers(body, call_id, asked, enough=enough)
            for index, answer in answers.items():
                if has_routes(body) and was_queued(answer):
                    asked.note_cut(answer)
                    continue
                one, asking = sequences[index], body["sampling_params"][index]
                num_tokens += self._extend(one, answer, asked, asking, policy_version=version)
        self.tokens_sampled += num_tokens
        if num_tokens:
            asked.in_vain = 0
        elif self._gate.is_set():  # no update or pause cut it short, and no server was lost
            asked.in_vain += 1

    def _extend(
        self,
        one: Sequence,
        answer: dict[str, Any],
        asked: Asked,
        asking: dict[str, Any],
        *,
        policy_version: int,
    ) -> int:
        vocab_size = self.spec.arch.vocab_size
        num = one.extend(answer, asking, policy_version=policy_version, vocab_size=vocab_size)
        if asked.request.with_routes:
            ids = asked.request.prompt_token_ids.tolist() + one.token_ids
            found = routes_of(answer["meta_info"], ids, self.spec, self.tables)
            one.routes = joined(one.routes, found)
        if one.finish_reason == "abort":
            asked.note_cut(answer)
        return num

    @contextmanager
    def _under_way(self, call_id: str, sequences: list[Sequence]) -> Iterator[None]:
        """The server is at it: `quiet` waits for its end."""
        self._calls[call_id] = sequences
        self._idle.clear()
        try:
            yield
        finally:
            del self._calls[call_id]
            if not self._calls:
                self._idle.set()

    async def _score_answers(
        self, sequences: list[list[int]], call_id: str, *, timeout_s: float = _CALL_S
    ) -> list[dict[str, Any]]:
        if not sequences:
            return []
        body = score_body(sequences, call_id=call_id)
        return await self.server.client.score(body, timeout_s=timeout_s)

    def _scores(
        self, sequences: list[list[int]], answers: list[dict[str, Any]]
    ) -> list[np.ndarray]:
        size = self.spec.arch.vocab_size
        return [
            scores_of(one, ids, vocab_size=size)
            for one, ids in zip(answers, sequences, strict=True)
        ]

    async def _answers(
        self, body: dict[str, Any], call_id: str, asked: Asked, *, enough: int
    ) -> dict[int, dict[str, Any]]:
        """What each sequence got, by index; the rest are aborted once `enough` are complete, and
        all once the request has ended. With sequences to spare each has a call of its own."""
        size = len(body["input_ids"])
        bodies = [body] if enough == size else single_bodies(body)
        calls = [asyncio.create_task(self._call(one, call_id, asked)) for one in bodies]
        running = dict(zip(calls, bodies, strict=True))
        ending = asyncio.create_task(asked.ended.wait())
        try:
            while running:
                is_over = enough <= 0 or asked.ended.is_set()
                if is_over:
                    await self._abort(running.values())
                ended, _ = await asyncio.wait(
                    running if is_over else {*running, ending},
                    # Then again: the server may not have known the sequence yet.
                    timeout=_ABORT_AGAIN_S if is_over else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for call in [call for call in running if call in ended]:
                    stops = running.pop(call)["sampling_params"][0]["stop_token_ids"]
                    enough -= sum(is_complete(one, stops) for one in call.result().values())
        finally:
            for task in (*calls, ending):
                await end(task)
        found = [call.result() for call in calls]
        return found[0] if bodies[0] is body else {i: one[0] for i, one in enumerate(found) if one}

    async def _abort(self, bodies: Iterable[dict[str, Any]]) -> None:
        """End the sequences of calls that run; a server that cannot be told loses the calls."""
        client = self.server.client
        try:
            for body in list(bodies):
                for rid in body["rid"]:
                    await client.abort(rid)
        except HttpFailed as err:
            log.warning("sglang_abort_lost", error=str(err))

    async def _call(
        self, body: dict[str, Any], call_id: str, asked: Asked
    ) -> dict[int, dict[str, Any]]:
        """What each sequence of a call got; of a call that was lost, what had come by then."""
        client, server = self.server.client, self.server.spec
        size, found = len(body["input_ids"]), dict[int, dict[str, Any]]()
        try:
            if server.stream_interval and not has_routes(body):
                async for index, answer in client.stream(body, timeout_s=_CALL_S):
                    found[index] = answer  # kept when the stream breaks
            else:
                found = dict(enumerate(await client.generate(body, timeout_s=_CALL_S)))
        except HttpFailed as err:
            if err.status in _REFUSED:
                raise ValueError(f"SGLang refused {call_id}: {err}") from err
            log.warning("sglang_call_lost", call=call_id, error=str(err))
            asked.note_lost(err)
            await self._shut_if_lost()
            return {i: interrupted(found[i]) for i in found if i in range(size)}
        if found.keys() != set(range(size)):
            raise ServerRefused(f"sequences {sorted(found)} of {size} were answered")
        return found

    async def _shut_if_lost(self) -> None:
        """No call goes to a server that is gone; the guard brings another, and they go on there.

        One that is well lost this call alone, and the others have nothing to wait for.
        """
        if not self._gate.is_set():
            return
        if self._health is None or self._health.done():  # one question for all that were lost
            self._health = asyncio.create_task(self.server.is_well())
        if not await asyncio.shield(self._health):
            self._gate.clear()
