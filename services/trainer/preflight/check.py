"""The preflight of one job: once, before its first prompt is drawn; a resume does not repeat it.

check_memory   before the ranks are started
run            the first version is offered without a probe, since here is the judge of it:
               a server serves it -> parity of each server -> dry update of each server
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from services.trainer.books import Books
from services.trainer.events import EventLog, EventMaker
from services.trainer.preflight.devices import Devices, find_devices
from services.trainer.preflight.dry_update import dry_update
from services.trainer.preflight.findings import Findings, MemoryPlan, PreflightRefused, ServerParity
from services.trainer.preflight.memory import plan_device, plan_memory
from services.trainer.preflight.parity import ParityCheck, ParityUnknown, Trained
from services.trainer.publisher import Publisher
from services.trainer.transactions import Transaction, UpdateFailed
from shared.errors import DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.job import Job
from shared.models.deepseek_v4.architecture import Architecture
from shared.process import available_memory_bytes

log = structlog.get_logger()
NOTE = "preflight"  # of the books: what a passed preflight found
NUM_PROMPTS = 4
TEMPORARY = (None, 409, 502, 503, 504)  # None: no answer at all
RETRY_S = 0.5


class _NotNow(TandemError):
    """A server went away, or has another version meanwhile."""


class Preflight:
    def __init__(
        self,
        *,
        job: Job,
        checkpoint: Path,
        books: Books,
        record: EventLog,
        events: EventMaker,
        publisher: Publisher,
        ranks: Trained,
        http: HttpClient,
        prompts: Sequence[Sequence[int]],
        settle_grace_s: float,
        available_bytes: Callable[[], int] = available_memory_bytes,
        find_devices: Callable[[], Awaitable[Devices | None]] = find_devices,
    ) -> None:
        self._job, self._checkpoint, self._settings = job, checkpoint, job.preflight
        self._books, self._record, self._events = books, record, events
        self._publisher, self._ranks, self._http = publisher, ranks, http
        self._prompts = prompts[:NUM_PROMPTS]
        self._settle_grace_s = settle_grace_s
        self._available_bytes = available_bytes
        self._find_devices = find_devices
        self._findings = Findings()

    @property
    def is_due(self) -> bool:
        return self._settings.enabled and self._books.read_note(NOTE) is None

    async def check_memory(self) -> None:
        """Raises `PreflightRefused` before anything has been started that would not fit."""
        if not self.is_due:
            return
        arch = await asyncio.to_thread(Architecture.load, self._checkpoint)
        plan = self._findings.memory = await self._plan(arch)
        share = self._settings.max_memory_share
        if plan.available is not None and plan.needed > share * plan.available:
            parts = ", ".join(f"{name} {_gb(size)}" for name, size in plan.parts.items())
            self._refuse(
                f"memory: {_gb(plan.needed)} are needed ({parts}), {_gb(plan.available)} are "
                f"available and preflight.max_memory_share is {share:g}"
            )

    async def _plan(self, arch: Architecture) -> MemoryPlan:
        """Of the host, or of an accelerator if it has any; what is not compared then is told."""
        devices, job = await self._find_devices(), self._job
        if devices is None:
            available = self._available_bytes()
            return await asyncio.to_thread(plan_memory, job, arch, available_bytes=available)
        if devices.free_bytes is None:
            self._findings.untold.append(
                "the memory plan is compared with nothing: nobody says what is free of the "
                "accelerators of this host"
            )
        self._findings.untold.append(
            "a rank alone is planned for an accelerator: memory of samplers, of the host "
            "and of other nodes' accelerators is not compared"
        )
        return await asyncio.to_thread(plan_device, job, arch, free_bytes=devices.free_bytes)

    async def run(self, policy_version: int) -> None:
        """Raises `PreflightRefused`, or `DeadlineExceeded` when no server comes to serve."""
        if not self.is_due:
            return
        began_s = time.monotonic()
        self._publisher.probing = False
        try:
            await self._served(policy_version)
            arch = await asyncio.to_thread(Architecture.load, self._checkpoint)
            check = ParityCheck(
                self._http,
                self._ranks,
                job=self._job,
                arch=arch,
                prompts=self._prompts,
                policy_version=policy_version,
                timeout_s=self._settings.deadline_s,
            )
            async with asyncio.timeout(self._settings.deadline_s):
                await self._check_servers(check)
        except TimeoutError as err:
            what = f"the preflight of version {policy_version}"
            raise DeadlineExceeded(what, self._settings.deadline_s) from err
        finally:
            self._publisher.probing = True
        self._findings.seconds = time.monotonic() - began_s
        if self._findings.problems:
            self._refuse()
        self._tell()
        self._books.keep_note(NOTE, json.dumps(self._findings.fields()))

    async def _served(self, policy_version: int) -> None:
        deadline_s = self._settings.deadline_s
        await self._publisher.publish(policy_version)
        if not await self._publisher.wait_served(policy_version, deadline_s=deadline_s):
            at = "; ".join(f"{n}: {how}" for n, how in self._publisher.describe().items())
            what = f"a rollout server to serve version {policy_version} ({at or 'there is none'})"
            raise DeadlineExceeded(what, deadline_s)
        await self._publisher.wait_settled(policy_version, grace_s=self._settle_grace_s)

    async def _check_servers(self, check: ParityCheck) -> None:
        """Every server that serves the version, one at least; who goes away may come back."""
        done: set[str] = set()
        while True:
            serving = self._publisher.addresses(check.policy_version)
            waiting = {name: url for name, url in serving.items() if name not in done}
            if done and not waiting:
                return
            done |= {n for n, url in waiting.items() if await self._is_checked(check, n, url)}
            if not waiting.keys() <= done or not done:
                await asyncio.sleep(RETRY_S)

    async def _is_checked(self, check: ParityCheck, name: str, url: str) -> bool:
        """False if the server cannot answer now."""
        try:
            await self._check_server(check, name, url)
        except _NotNow as err:
            log.warning("preflight_server_unavailable", server=name, error=str(err))
            return False
        return True

    async def _check_server(self, check: ParityCheck, name: str, url: str) -> None:
        try:
            found = await check.of(name, url)
        except HttpFailed as err:
            if err.status in TEMPORARY:
                raise _NotNow(str(err)) from err
            self._findings.problems.append(f"{name} cannot be compared: {err}")
            return
        except ParityUnknown as err:
            self._findings.problems.append(f"{name} cannot be compared: {err}")
            return
        problems = self._departures(found) or await self._dry_update(check, name, url)
        if found.walked is None:
            self._findings.untold.append(
                f"{name} is compared by log-probabilities alone: no layer walk between "
                f"{self._job.rollout.engine} and these ranks"
            )
        self._findings.parity.append(found)
        self._findings.problems += problems

    async def _dry_update(self, check: ParityCheck, name: str, url: str) -> list[str]:
        deadline_s = self._job.update.deadline_s
        transaction = Transaction(self._http, server_url=url, deadline_s=deadline_s)
        version = check.policy_version
        try:
            found = await dry_update(
                transaction,
                server=name,
                policy_version=version,
                probe=self._publisher.probe(version),
            )
        except HttpFailed as err:
            if err.status in TEMPORARY:
                raise _NotNow(str(err)) from err
            return [f"{name}: the dry update of version {version} failed: {err}"]
        except DeadlineExceeded as err:
            bound = "update.deadline_s"
            return [f"{name}: the dry update of version {version} failed: {err} ({bound})"]
        except UpdateFailed as err:
            return [f"{name}: the dry update of version {version} failed: {err}"]
        if found is None:
            engine = self._job.rollout.engine
            self._findings.untold.append(
                f"{name} makes no dry update: {engine} cannot rehearse one"
            )
            return []
        self._findings.dry_updates.append(found)
        if found.is_same:
            return []
        return [f"{name}: a dry update of version {version} came to another effective checksum"]

    def _departures(self, found: ServerParity) -> list[str]:
        """What is beyond a bound, and which sub-module it comes from."""
        alike, own = self._settings.max_mean_abs_delta_logprob, self._job.bounds
        where = found.departs_at or "no sub-module could be named"
        problems = []
        if found.departs_at is not None and self._settings.walk:
            problems.append(f"{found.server}: {found.walked}")
        elif self._job.rollout.engine == "embedded" and not found.alike_mean <= alike:
            problems.append(
                f"{found.server}: mean |delta log p| {found.alike_mean:.4g} with both sides "
                f"rounding alike exceeds preflight.max_mean_abs_delta_logprob = {alike:g} ({where})"
            )
        if not found.own_mean <= own.max_mean_abs_delta_logprob:
            problems.append(
                f"{found.server}: mean |delta log p| {found.own_mean:.4g} as the ranks train "
                f"exceeds bounds.max_mean_abs_delta_logprob = "
                f"{own.max_mean_abs_delta_logprob:g} ({where})"
            )
        return problems

    def _refuse(self, *problems: str) -> None:
        self._findings.problems += problems
        self._tell()
        raise PreflightRefused("; ".join(self._findings.problems))

    def _tell(self) -> None:
        fields = self._findings.fields()
        self._record.note(self._events("preflight_finished", **fields))
        log.info(
            "preflight_finished",
            passed=fields["passed"],
            problems=fields["problems"],
            untold=fields["untold"],
            seconds=round(self._findings.seconds, 2),
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
