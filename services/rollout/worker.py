"""Prompts in, sampled groups out.

prompts ──> taken while current and free ──> n completions ──> rollouts ──> ack
               └── held, outdated, stopping: what is not begun goes back; what runs is finished
"""

import asyncio
import math
import time
from functools import partial
from typing import Any

import numpy as np
import structlog

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.server import RolloutServer
from services.rollout.serving import Serving
from shared import topology
from shared.errors import ChannelClosed, DeadlineExceeded, NotYet, Rejected, Retryable
from shared.job import Job
from shared.messages import Event, PromptGroup, Rollout, RolloutGroup, StoredRoutes, VersionSpan
from shared.route_store import store_routes
from shared.routes import TokenRoutes, pack_routes
from shared.spans import span
from shared.streams import Consumer, Session, backlog, publish
from shared.tasks import drain, wait_for_event
from shared.telemetry import counter, histogram, note_backlog, now_s
from shared.tokenizer import CheckpointTokenizer

log = structlog.get_logger()

BACKLOG_EVERY_S = 5.0
BLOCK_S = 0.1  # a read that waits cannot be called off, and the gate closes at every new version
GOODBYE_S = 3.0  # of the drain time, left for handing work back


class SampleWorker:
    def __init__(self, server: RolloutServer) -> None:
        self._server = server
        self._redis = server.redis
        self._config = server.config
        self._groups = counter("rollout_groups_total", "Groups sampled and published.")
        self._tokens = counter("rollout_tokens_total", "Response tokens of published groups.")
        self._route_bytes = counter(
            "rollout_route_bytes_total", "Compressed routes of published groups."
        )
        self._seconds = histogram("rollout_group_seconds", "From a prompt taken to its group out.")

    async def run(self, stop: asyncio.Event) -> None:
        """Serve one job after the other until `stop`."""
        while not stop.is_set():
            serving = self._server.serving
            if serving is None or serving.closing.is_set():
                await wait_for_event(stop, 0.1)
                continue
            await self._serve(serving, stop)

    async def watch_backlog(self, stop: asyncio.Event) -> None:
        """Measure how many prompts wait."""
        while not stop.is_set():
            if serving := self._server.serving:
                stream = topology.prompts(serving.job_id)
                note_backlog("prompts", await backlog(self._redis, stream, topology.SAMPLERS))
            await wait_for_event(stop, BACKLOG_EVERY_S)

    async def _serve(self, serving: Serving, stop: asyncio.Event) -> None:
        consumer = Consumer(
            self._redis,
            topology.prompts(serving.job_id),
            topology.SAMPLERS,
            self._config.name,
            block_s=BLOCK_S,
        )
        running: dict[bytes, asyncio.Task[None]] = {}
        async with consumer.session() as session:
            while not stop.is_set() and not serving.closing.is_set():
                if self._server.may_take:
                    await self._take(session, serving, running, stop)
                    # Read, but not begun: others may have it.
                    await session.hand_back(session.held_ids - running.keys())
                _raise_crash(running)
                await wait_for_event(stop, 0.02)
            await drain(set(running.values()), max(self._config.drain_s - GOODBYE_S, 0.0))
        _raise_crash(running)

    async def _take(
        self,
        session: Session,
        serving: Serving,
        running: dict[bytes, asyncio.Task[None]],
        stop: asyncio.Event,
    ) -> None:
        """Begin groups until the gate closes, the share of the work changes, or a stop."""
        halt, share = asyncio.Event(), self._share(serving)
        watching = asyncio.create_task(self._watch_gate(serving, share, running, stop, halt))

        async def handle(body: bytes) -> None:
            await self._handle(serving, body)

        def settled(entry_id: bytes, task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is None:
                running.pop(entry_id, None)

        try:
            async for delivery in session.deliveries(halt, max_unacked=share):
                entry_id = delivery.entry_id
                task = asyncio.create_task(session.process(delivery, handle), name="group")
                running[entry_id] = task
                task.add_done_callback(partial(settled, entry_id))
        finally:
            halt.set()
            await watching

    async def _watch_gate(
        self,
        serving: Serving,
        share: int,
        running: dict[bytes, asyncio.Task[None]],
        stop: asyncio.Event,
        halt: asyncio.Event,
    ) -> None:
        while not halt.is_set():
            self._server.changed.clear()
            crashed = any(task.done() for task in running.values())
            open_ = self._server.may_take and self._share(serving) == share
            if stop.is_set() or crashed or not open_:
                halt.set()
                return
            await wait_for_event(self._server.changed, 0.1)

    def _share(self, serving: Serving) -> int:
        """Groups to have at once: what fills the engine, but no more than this server's part.

        All groups that may be open at the same time are divided among the servers that take them.
        """
        return group_share(serving.job, self._server.num_peers)

    async def _handle(self, serving: Serving, body: bytes) -> None:
        prompt = PromptGroup.unpack(body)
        with (
            structlog.contextvars.bound_contextvars(group_id=prompt.group_id),
            span("group", "groups", group=prompt.group_id),
        ):
            check_prompt(prompt, serving)
            await self._answer(serving, prompt)

    async def _answer(self, serving: Serving, prompt: PromptGroup) -> None:
        began_s = time.monotonic()
        if not await self._server.wait_version(
            serving, prompt.min_policy_version, self._config.version_wait_s
        ):
            held = serving.policy_version
            raise NotYet(  # an outage or a way back may take long
                f"{prompt.group_id} needs version {prompt.min_policy_version}, not {held}"
            )
        completions = await self._sample(serving, prompt)
        routes = await self._keep_routes(prompt, completions)
        group = to_group(
            prompt,
            completions,
            serving.tokenizer,
            replica=self._config.name,
            sampling_s=time.monotonic() - began_s,
            routes=routes,
        )
        await publish(self._redis, topology.rollouts(prompt.job_id), group.pack())
        await self._report(group)

    async def _sample(self, serving: Serving, prompt: PromptGroup) -> dict[int, Completion]:
        request = GroupRequest(
            request_id="",
            prompt_token_ids=prompt.prompt_token_ids,
            samples=list(range(prompt.num_samples + prompt.extra_samples)),
            enough=prompt.num_samples,
            sampling=prompt.sampling,
            seed=prompt.seed,
            with_routes=serving.engine.spec.records,
        )
        try:
            return await serving.sample(request, timeout_s=self._config.group_deadline_s)
        except (ChannelClosed, DeadlineExceeded, TimeoutError) as err:
            raise Retryable(f"{prompt.group_id}: {err or 'sampling took too long'}") from err
        except ValueError as err:
            raise Rejected(f"{prompt.group_id}: {err}") from err

    async def _keep_routes(
        self, prompt: PromptGroup, completions: dict[int, Completion]
    ) -> StoredRoutes | None:
        """What the engine recorded goes into a key of its own, before the group is published."""
        routes = [one.routes for one in completions.values()]
        if not any(routes):
            return None
        blobs = await asyncio.to_thread(_packed_routes, routes)
        stored = await store_routes(
            self._redis, job_id=prompt.job_id, group_id=prompt.group_id, blobs=blobs
        )
        self._route_bytes.inc(stored.num_bytes)
        return stored

    async def _report(self, group: RolloutGroup) -> None:
        tokens = sum(len(rollout.response_token_ids) for rollout in group.rollouts)
        self._groups.inc()
        self._tokens.inc(tokens)
        self._seconds.observe(group.sampling_s)
        versions = [v for rollout in group.rollouts if (v := rollout.oldest_version) is not None]
        fields: dict[str, Any] = {
            "group_id": group.prompt.group_id,
            "policy_version": min(versions, default=None),
            "tokens": tokens,
            "samples": len(group.rollouts),
            "seconds": group.sampling_s,
            "route_bytes": group.routes.num_bytes if group.routes else 0,
        }
        log.info("group_sampled", job_id=group.prompt.job_id, **fields)
        event = Event(
            name="group_sampled",
            job_id=group.prompt.job_id,
            service="rollout",
            replica=self._config.name,
            at_s=now_s(),
            fields=fields,
        )
        await publish(self._redis, topology.events(group.prompt.job_id), event.pack())


def group_share(job: Job, num_servers: int) -> int:
    """How many groups one of `num_servers` takes at once."""
    sampling = job.sampling
    begun = sampling.samples_per_prompt + sampling.extra_samples
    fills_engine = math.ceil(job.rollout.max_running_requests / begun)
    can_be_open = math.ceil(
        (job.algorithm.max_lag + 1) * sampling.groups_per_step * sampling.oversampling
    )
    return max(1, min(fills_engine, math.ceil(can_be_open / num_servers)))


def check_prompt(prompt: PromptGroup, serving: Serving) -> None:
    """Rejected names the value and its bound."""
    spec, ids = serving.engine.spec, prompt.prompt_token_ids
    if prompt.job_id != serving.job_id:
        raise Rejected(f"{prompt.group_id} is of job {prompt.job_id}, not {serving.job_id}")
    if len(ids) >= spec.context_length:
        raise Rejected(
            f"{prompt.group_id}: {len(ids)} prompt tokens leave no room in a context of "
            f"{spec.context_length}"
        )
    sampling = serving.job.sampling
    for asked, most in (
        (prompt.num_samples, sampling.samples_per_prompt),
        (prompt.extra_samples, sampling.extra_samples),
    ):
        if asked > most:
            raise Rejected(f"{prompt.group_id}: {asked} samples, the job asks for {most}")
    for bad in (int(ids.min()), int(ids.max())):
        if not 0 <= bad < spec.arch.vocab_size:
            raise Rejected(
                f"{prompt.group_id}: token id {bad} is outside the vocabulary of "
                f"{spec.arch.vocab_size}"
            )


def to_group(
    prompt: PromptGroup,
    completions: dict[int, Completion],
    tokenizer: CheckpointTokenizer,
    *,
    replica: str,
    sampling_s: float,
    routes: StoredRoutes | None = None,
) -> RolloutGroup:
    rollouts = [
        Rollout(
            rollout_id=f"{prompt.group_id}.{index}",
            response_token_ids=one.token_ids,
            logprobs=one.logprobs,
            version_spans=[
                VersionSpan(policy_version=version, num_tokens=num)
                for version, num in one.version_spans
            ],
            finish_reason=one.finish_reason,
            text=text_of(one, tokenizer),
        )
        for index, one in completions.items()
    ]
    return RolloutGroup(
        prompt=prompt,
        replica=replica,
        rollouts=rollouts,
        sampled_at_s=now_s(),
        sampling_s=sampling_s,
        routes=routes,
    )


def _packed_routes(routes: list[TokenRoutes | None]) -> list[bytes]:
    """One blob per completion, empty for one without a token."""
    return [b"" if one is None else pack_routes(one) for one in routes]


def text_of(completion: Completion, tokenizer: CheckpointTokenizer) -> str:
    """The response as text; the stop token is kept in the ids and left out here."""
    ids = completion.token_ids
    if completion.finish_reason == "stop":
        ids = ids[:-1]
    return tokenizer.decode(np.asarray(ids).tolist())


def _raise_crash(running: dict[bytes, asyncio.Task[None]]) -> None:
    """A handler ends its own message; what it lets through ends the process."""
    for task in running.values():
        if task.done() and not task.cancelled():
            task.result()
