"""The plan of small layouts against what their ranks send and hold in one step."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shared.models.deepseek_v4.checkpoint import write_release
from shared.planner import Plan, plan
from tests.integration.test_layouts import ARCHITECTURE
from tests.integration.traffic_world import ROUNDS, World, job
from tests.tiny_deepseek_v4 import random_weights

WORLDS = {world.name: world for worlds in ROUNDS for world in worlds}
RANKS = [(name, rank) for name, world in WORLDS.items() for rank in range(len(world.ranks))]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traffic")
    weights = random_weights(ARCHITECTURE, seed=3, spread=0.5)
    write_release(folder / "release", ARCHITECTURE.with_format("fp8"), weights)
    with (folder / "log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.integration.traffic_world", folder / "release", folder],
            stdout=log,
            stderr=log,
            timeout=150,
            check=False,
        ).returncode
    assert code == 0, (folder / "log").read_text()[-4000:]
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_ranks_send_what_was_planned(out: Path, name: str, rank: int) -> None:
    """Calls are equal; of the rows that routing sends, which is not even, bytes are nearly so."""
    found, planned = measured(out, name, rank), planned_of(out, WORLDS[name])
    stage = planned.setup.layout.stage_of(rank)
    calls: dict[str, int] = defaultdict(int)
    sent: dict[str, float] = defaultdict(float)
    for one in planned.traffic:
        if one.stage == stage:
            calls[one.operation] += one.calls
            sent[one.operation] += one.num_bytes
    assert found["calls"] == calls
    for operation, size in found["bytes"].items():
        assert sent[operation] == pytest.approx(
            size, rel=0.2 if operation == "all-to-all" else 0.02
        )


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_ranks_hold_what_was_planned(out: Path, name: str, rank: int) -> None:
    found, planned = measured(out, name, rank), planned_of(out, WORLDS[name])
    memory = planned.stages[planned.setup.layout.stage_of(rank)].memory
    assert memory.states == pytest.approx(found["states"], rel=0.01)
    activations = memory.activations + memory.working + memory.buffers
    assert activations == pytest.approx(found["activations"], rel=0.25)


@pytest.mark.parametrize("name", WORLDS)
def test_a_save_needs_no_more_than_was_planned(out: Path, name: str) -> None:
    """On the rank that writes the weights. A parameter that is cut goes to one rank whole, so there
    may be one more, of dense weights and of experts."""
    planned = planned_of(out, WORLDS[name])
    for rank in range(len(WORLDS[name].ranks)):
        stage = planned.stages[planned.setup.layout.stage_of(rank)]
        largest = 12 * stage.parameters.experts // len(stage.layers)
        assert measured(out, name, rank)["checkpoint"] < 1.02 * stage.host.checkpoint + largest


def measured(out: Path, name: str, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / f"{name}.{rank}.json").read_text())
    return read


def planned_of(out: Path, world: World) -> Plan:
    return plan(ARCHITECTURE, job(out / "release", world))
