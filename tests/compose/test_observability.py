"""The observability profile beside a running stack: every replica is scraped, every rule holds.

Prometheus is Debian's own package under the name that compose.yaml asks for, so that no registry is
needed; it reads the files of docker/observability as the official image does. Grafana has no
stand-in: tests/unit/test_observability.py holds its board against Grafana's own model of one.
"""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.compose.project import IMAGES, Project, run, until

STAND_IN = """FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\
    && rm -rf /var/lib/apt/lists/* && mkdir -p /etc/prometheus /prometheus \\
    && chown nobody /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
SERVICES = ("trainer", "rollout", "reward", "evaluator", "prometheus")
NUM_RULES = 10
CASES = Path(__file__).with_name("alerts.yaml")
JUDGE = 'printf %s "$1" > /tmp/alerts.yaml && promtool test rules /tmp/alerts.yaml'
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"

pytestmark = pytest.mark.timeout(900)


@pytest_asyncio.fixture
async def watched(images: list[str], project: Project) -> AsyncIterator[Project]:
    base = os.environ.get("PYTHON_IMAGE", "python:3.11-slim")
    image = f"{IMAGES}-prometheus"
    pipe = ["sh", "-c", 'printf %s "$MADE" | docker build --quiet -t "$IMAGE" -']
    await run(pipe, env={"MADE": STAND_IN.format(base=base), "IMAGE": image}, timeout_s=600)
    named = {"PROMETHEUS_IMAGE": image, "COMPOSE_PROFILES": "cpu,observability"}
    try:
        await project.compose(
            "up", "-d", "--wait", "--scale", "rollout=2", *SERVICES, variables=named
        )
        yield project
    finally:
        await project.compose("down", "-v", "--remove-orphans", variables=named)
        await run(["docker", "image", "rm", "--force", image])
    assert await project.left() == {}


async def asked(project: Project, path: str) -> Any:
    """Prometheus' answer, asked from inside the network: it has no published port."""
    url = f"http://prometheus:9090/api/v1/{path}"
    told = await project.compose("exec", "-T", "trainer", "python", "-c", ASK, url)
    return json.loads(told)["data"]


async def test_every_replica_is_scraped_and_every_rule_is_evaluated(watched: Project) -> None:
    async def scraped() -> bool:
        targets = (await asked(watched, "targets"))["activeTargets"]
        up = sorted(one["labels"]["job"] for one in targets if one["health"] == "up")
        return up == ["evaluator", "reward", "rollout", "rollout", "trainer"]

    await until(scraped, "all five replicas to be scraped")

    async def evaluated() -> bool:
        (group,) = (await asked(watched, "rules"))["groups"]
        assert len(group["rules"]) == NUM_RULES
        assert [one.get("lastError", "") for one in group["rules"]] == [""] * NUM_RULES
        return all(one["health"] == "ok" for one in group["rules"])

    await until(evaluated, "all rules to be evaluated")
    found = (await asked(watched, "query?query=count(process_start_time_seconds)by(job)"))["result"]
    counts = {one["metric"]["job"]: one["value"][1] for one in found}
    assert counts == {"trainer": "1", "rollout": "2", "reward": "1", "evaluator": "1"}

    made_up = ("sh", "-c", JUDGE, "sh", CASES.read_text())
    assert "SUCCESS" in await watched.compose("exec", "-T", "prometheus", *made_up)
