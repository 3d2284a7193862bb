"""What this replica is doing: which job, which version, held or not, and what it may take.

JOB_CURRENT ──> run: start and end engines ──> serving
weights:current, holds, replicas ──> watch ──> target version, share of the work
                                               └──> gate: may prompts be taken now?
everything ──> describe: the registry's record; unready: why there should be no traffic
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any, cast

import structlog
from redis.asyncio import Redis

from services.rollout.config import RolloutConfig
from services.rollout.info import ServerInfo
from services.rollout.peers import Peers
from services.rollout.serving import Serving, serving_job
from services.rollout.starts import Starts
from shared import topology
from shared.current_job import CurrentJob
from shared.environment import Environment
from shared.errors import ChannelClosed, DeadlineExceeded, Fatal, RemoteError
from shared.messages import JobAnnounced, WeightsAnnounced
from shared.profiled import Profiled
from shared.redis import broker_trouble
from shared.registry import LEASE_S, Replica, ServerState, live_replicas, register, unregister
from shared.spans import recorder
from shared.tasks import end, wait_for_event
from shared.telemetry import gauge
from shared.weights.shard_server import Coming, Kind, ShardServer

log = structlog.get_logger()


class RolloutServer:
    def __init__(self, redis: Redis, config: RolloutConfig) -> None:
        self.redis = redis
        self.config = config
        self.serving: Serving | None = None
        self.paused = False
        self.shards = ShardServer(self._find_shard, host=config.host, port=config.shards_port)
        self.changed = asyncio.Event()  # set whenever the record, the gate or the share may differ
        self.num_peers = 1  # servers that take this job's prompts, this one included
        self._peers = Peers()
        self._current = CurrentJob(redis)
        self.profiled = Profiled(
            redis, self._current, service="rollout", replica=config.name, child=self._engine_spans
        )
        self.environment = Environment(
            redis,
            self._current,
            config,
            service="rollout",
            replica=config.name,
            more=self._engine_environment,
        )
        self._starting = False
        self._starts = Starts(config.engine_retry_s, config.engine_starts)
        self._announced_version: int | None = None
        self._held_version: int | None = None
        self._engines = contextlib.AsyncExitStack()
        self._register_now = asyncio.Event()

    # ---------------------------------------------------------------- what we are

    @property
    def state(self) -> ServerState:
        if self._starting:
            return "starting"
        if self.serving is None:
            return "stopped" if self._starts.failures else "idle"
        if self.serving.updates.is_activating:
            return "updating"
        return "waiting_for_weights" if self.serving.policy_version is None else "serving"

    @property
    def is_job_active(self) -> bool:
        return self.serving is not None and self.serving.job_id == self._current.active_id

    @property
    def may_take(self) -> bool:
        """Whether training prompts may be taken: no evaluation, no pause, weights that its lag
        allows. While a newer version is on its way, what does not need it is sampled."""
        serving = self.serving
        if serving is None or serving.closing.is_set() or self.paused or not self.is_job_active:
            return False
        if serving.policy_version is None or self._held_version is not None:
            return False
        announced = self._announced_version
        lag = serving.job.algorithm.max_lag
        return announced is not None and serving.policy_version >= announced - lag

    @property
    def wanted_version(self) -> int | None:
        """What is to be served: an evaluation's version while it is held, else the current one."""
        return self._announced_version if self._held_version is None else self._held_version

    def describe(self) -> Replica:
        serving = self.serving
        return Replica(
            service="rollout",
            name=self.config.name,
            url=self.config.url,
            pid=os.getpid(),
            job_id=serving.job_id if serving else self._current.active_id,
            state=self.state,
            engine=serving.job.rollout.engine if serving else "",
            policy_version=serving.policy_version if serving else None,
            shards_url=self.config.url_at(self.shards.port),
            paused=self.paused,
            trouble="" if serving else self._starts.reason,
            gave_up=serving is None and self._starts.gave_up,
        )

    def unready(self) -> str | None:
        """Why this server should get no traffic; None if it may."""
        if trouble := broker_trouble(self.redis):
            return trouble
        if self._current.active_id is None:
            return None
        serving = self.serving
        if serving is None and self._starts.failures:
            return self._starts.describe()
        if serving is None or self._starting:
            return f"starting the engine of job {self._current.active_id}"
        if self.paused:
            return "paused by request"
        if serving.policy_version is None:
            return "waiting for weights"
        wanted = self.wanted_version
        if wanted is not None and serving.policy_version < wanted:
            return f"serves version {serving.policy_version}, version {wanted} is wanted"
        return None

    def info(self) -> ServerInfo:
        serving = self.serving
        engine = serving.engine if serving else None
        return ServerInfo(
            **self.describe().model_dump(),
            current_version=self._announced_version,
            held_version=self._held_version,
            unready=self.unready(),
            effective_checksum=engine.checksum if engine else None,
            engine_pid=engine.pid if engine else None,
            running=engine.load.running if engine else 0,
            waiting=engine.load.waiting if engine else 0,
            tokens_sampled=engine.load.tokens_sampled if engine else 0,
        )

    def known_sources(self, peers: list[Replica]) -> list[str]:
        """Addresses that weights may be pulled from."""
        urls = [url.rstrip("/") for peer in peers for url in (peer.url, peer.shards_url) if url]
        return [*urls, self.serving.trainer_url.rstrip("/")] if self.serving else urls

    def note_change(self) -> None:
        """Something that others see has changed: tell the registry and whoever waits."""
        self._register_now.set()
        self.changed.set()

    async def wait_version(self, serving: Serving, version: int, timeout_s: float) -> bool:
        """Whether `version` or a later one is served within `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while serving.policy_version is None or serving.policy_version < version:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0 or serving.closing.is_set() or self._held_version is not None:
                return False
            await asyncio.sleep(min(left_s, 0.05))
        return True

    # ---------------------------------------------------------------- loops

    async def run(self, stop: asyncio.Event) -> None:
        """Start and end engines as jobs come and go."""
        changed = asyncio.Event()
        following = asyncio.create_task(self._current.follow(stop, changed), name="follow jobs")
        try:
            while not stop.is_set():
                changed.clear()
                await self._adopt()
                await wait_for_event(changed, 1.0)
                if following.done():
                    following.result()
        finally:
            await end(following)

    async def watch(self, stop: asyncio.Event) -> None:
        """Keep an eye on the current version, the holds and the other servers."""
        looked_ns = time.monotonic_ns()
        while not stop.is_set():
            if self.serving is not None:
                await self._look(self.serving)
            now_ns = time.monotonic_ns()
            if self._held_version is not None:
                recorder().note("held", "held", looked_ns, now_ns, version=self._held_version)
            looked_ns = now_ns
            await wait_for_event(stop, self.config.watch_s)

    async def guard_engine(self, stop: asyncio.Event) -> None:
        """An engine that dies takes the process with it: the supervisor starts both anew."""
        while not stop.is_set():
            serving = self.serving
            if serving is not None and serving.engine.died.is_set():
                raise Fatal(f"the engine of job {serving.job_id} died (pid {serving.engine.pid})")
            died = serving.engine.died if serving is not None else stop
            await wait_for_event(died, 0.2)

    async def stay_registered(self, stop: asyncio.Event) -> None:
        """Renew the lease; a change of state is told at once."""
        while not stop.is_set():
            self._register_now.clear()
            await register(self.redis, self.describe())
            await wait_for_event(self._register_now, LEASE_S / 4)
        await unregister(self.redis, "rollout", self.config.name)

    async def close(self) -> None:
        """End the engine. Called when all loops have ended."""
        await self._end_serving()
        await asyncio.to_thread(self.shards.close)

    # ---------------------------------------------------------------- details

    async def _engine_spans(self, max_spans: int) -> dict[str, Any]:
        """What the engine did for a profile; nothing while there is none."""
        if self.serving is None:
            return {}
        try:
            return await self.serving.engine.spans(max_spans)
        except (ChannelClosed, DeadlineExceeded, RemoteError) as err:
            log.warning("engine_tells_no_spans", error=str(err))
            return {}

    async def _engine_environment(self, job_id: str) -> dict[str, Any] | None:
        """What the job's engine runs with, once there is one."""
        if self.serving is None or self.serving.job_id != job_id:
            return None
        try:
            return {"engine": await self.serving.engine.environment()}
        except (ChannelClosed, DeadlineExceeded, RemoteError) as err:
            log.warning("engine_tells_no_environment", error=str(err))
            return None

    def _find_shard(self, version: int, kind: Kind, index: int) -> Path | Coming | None:
        """Weights for other servers; called in threads."""
        serving = self.serving
        return None if serving is None else serving.updates.find(version, kind, index)

    async def _adopt(self) -> None:
        announced = self._current.announced
        if announced is None or announced.job_id != self._current.active_id:
            if self._starts.failures:
                self._starts.forget()
                self.note_change()
            return
        if self.serving is not None:
            if self.serving.job_id == announced.job_id:
                self.serving.trainer_url = announced.trainer_url
                return
            await self._end_serving()
        if self._starts.may_try(announced.job_id):
            await self._begin_serving(announced)

    async def _begin_serving(self, announced: JobAnnounced) -> None:
        self._starting, self.paused = True, False
        self._announced_version = self._held_version = None
        self.note_change()
        try:
            self.serving = await self._engines.enter_async_context(
                serving_job(announced, self.config, on_change=self.note_change)
            )
        except (ValueError, OSError, RemoteError, ChannelClosed, DeadlineExceeded) as err:
            self._starts.note_failed(str(err))
            log.warning(
                "engine_not_started", job_id=announced.job_id, error=self._starts.describe()
            )
        else:
            self._starts.forget()
            await self._look(self.serving)
            log.info("serving_job", job_id=announced.job_id, engine_pid=self.serving.engine.pid)
        finally:
            self._starting = False
            self.note_change()

    async def _end_serving(self) -> None:
        if self.serving is None:
            return
        job_id = self.serving.job_id
        self.serving.closing.set()
        self.serving = None
        self.note_change()
        await self._engines.aclose()
        self._engines = contextlib.AsyncExitStack()
        log.info("engine_ended", job_id=job_id)

    async def _look(self, serving: Serving) -> None:
        """One round trip: what is current, and whether this server is held."""
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.get(topology.weights_current(serving.job_id))
            pipe.hgetall(topology.holds(serving.job_id))
            body, holds = await pipe.execute()
        announced = WeightsAnnounced.unpack(body).policy_version if body else None
        held = cast(dict[bytes, bytes], holds).get(self.config.name.encode())
        num_peers = self._peers.count(
            await live_replicas(self.redis, "rollout"),
            job_id=serving.job_id,
            announced=announced,
            held={name.decode() for name in holds},
            patience_s=serving.job.update.deadline_s,
            now_s=asyncio.get_running_loop().time(),
        )
        before = (self._announced_version, self._held_version, self.num_peers)
        self._announced_version = announced
        self._held_version = None if held is None else int(held)
        self.num_peers = num_peers
        if self.wanted_version is not None:
            wanted = gauge("rollout_wanted_version", "The version to serve: held or current.")
            wanted.set(self.wanted_version)
        if before != (self._announced_version, self._held_version, self.num_peers):
            self.changed.set()
