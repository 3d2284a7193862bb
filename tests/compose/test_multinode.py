"""compose.multinode.yaml runs a job: head, actor and rollout node, each a project of its own.

All on this machine's network, where a node is an address of the loopback interface: ranks of two
torchruns meet over gloo, the sampler and the broker are reached at their nodes' addresses.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.document import read_job
from services.client import TandemClient
from shared.process import port_in_use
from tests.balanced_books import check_books
from tests.compose.project import ROOT, Project

HEAD, ROLLOUT_NODE = "127.0.0.2", "127.0.0.3"
STEPS = 3
CHANGES = (
    f"steps={STEPS}", f"eval.every_steps={STEPS}", "preflight.walk=false",
    "cluster.nodes=3", "cluster.actor_nodes=2", "cluster.rollout_nodes=1",
    f"cluster.rendezvous.host={HEAD}",
    *(f"actor.env.{name}_SOCKET_IFNAME=$SITE_SOCKET_IFNAME" for name in ("GLOO", "NCCL", "TP")),
    "actor.env.NCCL_IB_HCA=$SITE_IB_HCA",
)  # fmt: skip
PATIENCE_S = 240.0

pytestmark = pytest.mark.timeout(900)


class Node(Project):
    """The roles of one node."""

    files = ("compose.multinode.yaml", "tests/compose/multinode_cpu.yaml")


@pytest_asyncio.fixture
async def nodes(images: list[str], project: Project, tmp_path: Path) -> AsyncIterator[Path]:
    """The shared run folder."""
    if port_in_use(HEAD, 6379) or port_in_use(HEAD, 8700) or port_in_use("127.0.0.1", 8730):
        pytest.skip("the fixed ports of the multi-node file are in use on this machine")
    runs, data = tmp_path / "runs", tmp_path / "data"
    for folder in (runs, data):
        folder.mkdir()
        folder.chmod(0o777)  # containers write as another user
    site = {
        "SITE_HEAD": HEAD, "SITE_SOCKET_IFNAME": "lo", "SITE_IB_HCA": "none",
        "NODE_ADDRESS": ROLLOUT_NODE, "RUNS_DIR": str(runs), "DATA_DIR": str(data),
    }  # fmt: skip
    roles = {
        role: Node(f"{project.name}-{role}", 8700, password=project.password)
        for role in ("head", "actor", "rollout")
    }

    async def each(*arguments: str) -> None:
        for role, node in roles.items():
            variables = {**site, "COMPOSE_PROFILES": role}
            await node.compose(*arguments, variables=variables)

    try:
        await each("up", "-d", "--no-build")
        yield runs
    finally:
        await each("down", "-v", "--remove-orphans")
    for node in roles.values():
        assert await node.left() == {}


async def test_a_job_of_three_nodes_is_trained_by_ranks_of_two(nodes: Path) -> None:
    document = read_job(ROOT / "configs" / "demo.toml", CHANGES)
    async with TandemClient(f"http://{HEAD}:8700", patience_s=PATIENCE_S) as client:
        job_id = (await client.submit(document)).job_id
        async with aclosing(client.events(job_id)) as events:
            async for _ in events:
                pass
        status = await client.job(job_id)
        summary = await client.summary(job_id)
        servers = {one.service: one.url for one in await client.servers()}
    assert (status.state, status.step, status.error) == ("finished", STEPS, None)
    assert servers["rollout"] == f"http://{ROLLOUT_NODE}:8710"
    check_books(nodes / job_id / "books.sqlite", summary, steps=STEPS)
    logs = sorted(path.name for path in (nodes / job_id).glob("*ranks.log"))
    assert logs == ["node1.ranks.log", "ranks.log"]
