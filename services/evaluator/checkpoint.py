"""A bare checkpoint for an evaluation: what it is, and a sampler of it for as long as that takes.

The sampler is a child, `python -m services.rollout.standalone`, spoken to over HTTP like any
rollout server; it ends with us.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from services.evaluator.plan import EvaluationFailed
from shared.errors import DeadlineExceeded, HttpFailed, WeightsCorrupt
from shared.http import HttpClient
from shared.job import JOB_FILE, Job, expand_path
from shared.process import free_port
from shared.tasks import end
from shared.telemetry import now_s
from shared.weights.kept import VersionFolders
from shared.weights.manifest import MANIFEST_FILE, Manifest

HOST = "127.0.0.1"
OFFLINE = "offline"  # in place of a job's id
CONFIG_FILE = "config.json"
TORCH_DIST_FILE = ".metadata"
POLL_S, GOODBYE_S = 0.2, 10.0
MAX_LAST_WORDS = 600  # characters of the child's own words that are told
_CANNOT = "cannot be served"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A release directory, or a version that a run has published (then `weights` is its folder)."""

    release: Path
    weights: Path | None
    job_id: str
    policy_version: int
    serve_as: str
    fingerprint: str  # another one is another checkpoint

    @classmethod
    def find(cls, path: Path) -> "Checkpoint":
        """What lies at `path`, an absolute one; ValueError says why it is neither. Blocks."""
        if (path / MANIFEST_FILE).is_file():
            return cls._published(path)
        if (path / TORCH_DIST_FILE).is_file():
            raise ValueError(
                f"{path} is a torch_dist checkpoint of the actor, which no sampler reads. Convert "
                f"it first: `tandem convert {path} {path}-fp8 --to fp8 "
                f"--like RELEASE`, then evaluate {path}-fp8"
            )
        if not (path / CONFIG_FILE).is_file():
            raise ValueError(
                f"{path} has neither {CONFIG_FILE} nor {MANIFEST_FILE}: it is no release directory "
                "and no published version; other layouts need `tandem convert`"
            )
        return cls(path, None, OFFLINE, 0, "quantised", _fingerprint(path))

    @classmethod
    def _published(cls, folder: Path) -> "Checkpoint":
        """`runs/<job>/weights/v<version>`; the run's job names architecture and tokenizer."""
        job_file, kept = folder.parent.parent / JOB_FILE, VersionFolders(folder.parent)
        try:
            manifest = (folder / MANIFEST_FILE).read_bytes()
            version = Manifest.model_validate_json(manifest)
            job = Job.model_validate_json(job_file.read_bytes())
        except (OSError, ValueError) as err:
            raise ValueError(f"{folder} is no version of a run: {err}") from err
        if kept.path(version.policy_version) != folder:
            raise ValueError(f"{folder} is no version of a run: it holds {version.policy_version}")
        try:
            kept.check(version.policy_version)
        except WeightsCorrupt as err:
            raise ValueError(str(err)) from err
        return cls(
            release=expand_path(job.model.rollout_checkpoint),
            weights=folder,
            job_id=version.job_id,
            policy_version=version.policy_version,
            serve_as=job.rollout.weights,
            fingerprint=_digest(manifest),  # all its checksums are in there
        )


def _fingerprint(folder: Path) -> str:
    """By its files' names, sizes and times."""
    files = [(one.name, one.stat()) for one in sorted(folder.iterdir()) if one.is_file()]
    return _digest(json.dumps([(n, stat.st_size, stat.st_mtime_ns) for n, stat in files]).encode())


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


@contextlib.asynccontextmanager
async def whole(checkpoint: Checkpoint, scratch: Path) -> AsyncIterator[Checkpoint]:
    """The checkpoint with all its shards: a published version's are copied to `scratch` meanwhile,
    since its run may keep changes alone, now or before it is loaded."""
    if checkpoint.weights is None:
        yield checkpoint
        return
    kept = VersionFolders(checkpoint.weights.parent)
    try:
        try:
            copy = await asyncio.to_thread(kept.copy_whole, checkpoint.policy_version, scratch)
        except WeightsCorrupt as err:
            raise EvaluationFailed(str(err)) from err
        yield replace(checkpoint, weights=copy)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


@contextlib.asynccontextmanager
async def serving(
    checkpoint: Checkpoint,
    http: HttpClient,
    *,
    context_length: int,
    max_running_requests: int,
    deadline_s: float,
) -> AsyncIterator[str]:
    """The address of a sampler that serves it; `EvaluationFailed` tells why there is none."""
    port = free_port(HOST)
    command = [
        *(sys.executable, "-m", "services.rollout.standalone"),
        *("--checkpoint", str(checkpoint.release), "--host", HOST, "--port", str(port)),
        *("--policy-version", str(checkpoint.policy_version)),
        *("--context-length", str(context_length)),
        *("--max-running-requests", str(max_running_requests)),
        *("--serve-as", checkpoint.serve_as, "--parent-pid", str(os.getpid())),
        *(["--weights", str(checkpoint.weights)] if checkpoint.weights else []),
    ]
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    words: list[str] = []
    reading = [asyncio.create_task(_read(pipe, words)) for pipe in (child.stdout, child.stderr)]
    try:
        url = f"http://{HOST}:{port}"
        await _ready(url, child, http, words, deadline_s)
        yield url
    finally:
        await _end(child)
        await asyncio.gather(*(end(one) for one in reading))


async def _ready(
    url: str,
    child: asyncio.subprocess.Process,
    http: HttpClient,
    words: list[str],
    deadline_s: float,
) -> None:
    began_s = now_s()
    while now_s() < deadline_s:
        if child.returncode is not None:
            raise EvaluationFailed(_last_words(words) or f"the sampler ended: {child.returncode}")
        try:
            await http.get(f"{url}/readyz")
        except HttpFailed:
            await asyncio.sleep(POLL_S)
        else:
            return
    raise DeadlineExceeded("the checkpoint to be loaded", round(now_s() - began_s, 1))


async def _read(pipe: asyncio.StreamReader, words: list[str]) -> None:
    """Keep the last lines, so that the child never waits for us to read."""
    async for line in pipe:
        words.append(line.decode(errors="replace").rstrip())
        del words[:-50]


def _last_words(words: list[str]) -> str:
    told = [line for line in words if _CANNOT in line and not line.startswith("{")]
    return (told or words or [""])[-1][:MAX_LAST_WORDS]


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), GOODBYE_S)
        except TimeoutError:
            child.kill()
            await child.wait()
