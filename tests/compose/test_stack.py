"""`docker compose up`, a job over REST, and all that operators and accidents do meanwhile.

rollouts 2 -> 3 and rewards 1 -> 2, a rollout crashes, a reward container is killed, all go back to
one, the broker restarts; then the end of the job, its books, its report, and `down -v`.
"""

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.cli.document import read_job
from services.client import TandemClient
from tests.balanced_books import check_books
from tests.compose.project import PATIENCE_S, ROOT, Project, run, until

STEPS = 36
MORE = ("--scale", "rollout=3", "--scale", "reward=2")
# Kills the service itself, below the container's init: what a crash looks like to the engine.
CRASH = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if words[0].endswith(b"python") and b"services.rollout" in words:
        os.kill(int(folder.name), signal.SIGKILL)
"""

pytestmark = pytest.mark.timeout(1500)


@pytest_asyncio.fixture
async def stack(images: list[str], project: Project) -> AsyncIterator[Project]:
    try:
        await project.compose("up", "-d", "--scale", "rollout=2", "--wait")
        yield project
    finally:
        await project.compose("down", "-v", "--remove-orphans")
    assert await project.left() == {}


async def test_a_job_survives_scaling_kills_and_a_broker_restart(
    stack: Project, tmp_path: Path
) -> None:
    began_s = time.time()
    changes = [f"steps={STEPS}", f"eval.every_steps={STEPS}"]
    document = read_job(ROOT / "configs" / "demo.toml", changes)
    url = f"http://127.0.0.1:{stack.port}"
    async with TandemClient(url, patience_s=PATIENCE_S) as client:
        job_id = (await client.submit(document)).job_id
        await _events_up_to(client, job_id, step=1)
        await _scale_up(stack, client)
        await _kill(stack)
        await _scale_down(stack, client, began_s)
        await stack.compose("restart", "broker")
        assert (await client.job(job_id)).state == "running", "all this came after the job's end"
        await _events_up_to(client, job_id)
        status = await client.job(job_id)
        summary = await client.summary(job_id)
    assert (status.state, status.step, status.error) == ("finished", STEPS, None)
    assert [entry["step"] for entry in summary["evaluations"]] == [0, STEPS]
    run_dir = tmp_path / job_id
    await stack.compose("cp", f"trainer:/runs/{job_id}", str(tmp_path))
    check_books(run_dir / "books.sqlite", summary, steps=STEPS)
    await _check_pages(url, job_id)


async def _events_up_to(client: TandemClient, job_id: str, *, step: int | None = None) -> None:
    """Wait until the job has taken the step, or has ended."""
    async with aclosing(client.events(job_id)) as events:
        async for numbered in events:
            event = numbered.event
            if step is not None and event.name == "step" and event.fields["step"] >= step:
                return


async def _scale_up(stack: Project, client: TandemClient) -> None:
    before = set(await stack.containers("rollout"))
    await stack.compose("up", "-d", *MORE)
    [added] = set(await stack.containers("rollout")) - before
    await until(lambda: _serving(client, added), f"{added} to serve the current version")
    await until(lambda: _has_sampled(added), f"{added} to sample a group")
    await until(lambda: _num_graders(client, 2), "both graders to be there")


async def _kill(stack: Project) -> None:
    """One rollout crashes and comes back by itself; a killed container comes back with `up`."""
    crashing = (await stack.containers("rollout"))[0]
    rewards = await stack.containers("reward")
    await run(["docker", "exec", crashing, "python", "-c", CRASH])
    await run(["docker", "kill", rewards[0]])
    await stack.compose("up", "-d", "--no-recreate", *MORE)
    await until(lambda: _restarted(crashing), f"{crashing} to be started again")
    assert set(await stack.containers("reward")) == set(rewards)


async def _scale_down(stack: Project, client: TandemClient, began_s: float) -> None:
    await stack.compose("up", "-d", "--scale", "rollout=1")
    [kept] = await stack.containers("rollout")

    async def alone() -> bool:
        servers = [one.name for one in await client.servers() if one.service == "rollout"]
        return servers == [f"{kept}-8710"]

    await until(alone, f"{kept} to be the only server")
    await until(lambda: _num_graders(client, 1), "one grader to be left")
    assert await _exit_codes(stack, "rollout", began_s) == ["137", "0", "0"]  # a crash, two drains


async def _num_graders(client: TandemClient, wanted: int) -> bool:
    return sum(one.service == "reward" for one in await client.servers()) == wanted


async def _serving(client: TandemClient, container: str) -> bool:
    servers = {one.name: one for one in await client.servers()}
    found = servers.get(f"{container}-8710")
    return found is not None and found.state == "serving"


async def _has_sampled(container: str) -> bool:
    """Services log to standard error, and `docker logs` keeps the two apart."""
    logged = await run(["sh", "-c", 'docker logs "$1" 2>&1', "logs", container])
    return "group_sampled" in logged


async def _restarted(container: str) -> bool:
    found = json.loads(await run(["docker", "inspect", container]))[0]
    return bool(found["RestartCount"] == 1 and found["State"]["Running"])


async def _exit_codes(stack: Project, service: str, since_s: float) -> list[str]:
    """Of the service's containers that ended, in order of time."""
    labels = (f"project={stack.name}", f"service={service}")
    filters = [f"label=com.docker.compose.{one}" for one in labels]
    listing = ["docker", "events", "--since", f"{since_s:.0f}", "--until", f"{time.time():.0f}"]
    for one in ("event=die", *filters):
        listing += ["--filter", one]
    return (await run([*listing, "--format", "{{.Actor.Attributes.exitCode}}"])).split()


async def _check_pages(url: str, job_id: str) -> None:
    """Dashboard and report are there from outside; the broker is not published."""
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
        for path in ("/", f"/v1/jobs/{job_id}/report"):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert "text/html" in answer.headers["content-type"]
        assert job_id in answer.text
        assert "pass@1" in answer.text
