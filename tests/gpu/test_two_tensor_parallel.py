"""SGLang at tensor parallel 2: its stale attention sinks are seen by the probe and healed.

    first, second: A and B, each on both GPUs; a fresh load of either is the other's oracle

After an update every weight is the new one and a padded copy of the sinks is not: no checksum shows
it, log-probabilities do.
"""

import importlib.util
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs

from services.rollout.engine.sglang.transports import Disk
from tests.gpu.sglang_world import BOUND, Place, World, running
from tests.gpu.test_sglang import FLOOR, departure, is_exact

Figures = dict[str, Any]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, here are {torch.cuda.device_count()}",
    ),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> AsyncIterator[World]:
    both = Place("disk", tensor_parallel=2)
    async with running(tmp_path_factory.mktemp("sglang"), both, both) as found:
        kept = figures.setdefault("tensor parallel", {})
        kept["seconds_to_first_token"] = [found.first.start_s, found.second.start_s]
        yield found


async def test_noise_floor(world: World, figures: Figures) -> None:
    kept = figures["tensor parallel"]
    again = await world.first.scores()
    kept["same server twice"] = departure(again, world.first.fresh)
    kept["short texts are the same"] = is_exact(again, world.first.fresh)
    kept["A against B"] = departure(world.first.fresh, world.second.fresh)
    assert kept["same server twice"]["mean"] <= FLOOR
    assert kept["A against B"]["mean"] > BOUND


async def test_an_update_leaves_the_sinks_stale(world: World, figures: Figures) -> None:
    """Without a remedy: equal checksums, other scores. The old weights fit the old sinks again."""
    first, second = world.first, world.second
    kept = figures["tensor parallel"]
    await first.load(second.first, Disk())
    found = await first.checksums()
    differing = [key for key, one in second.fresh_checksums.items() if found.get(key) != one]
    kept["without the remedy"] = departure(await first.scores(), second.fresh)
    kept["checksums that differ"] = [len(differing), len(second.fresh_checksums)]
    await first.load(first.first, Disk())
    kept["back to the old version"] = departure(await first.scores(), first.fresh)
    assert not differing
    assert kept["without the remedy"]["mean"] > BOUND
    assert kept["back to the old version"]["mean"] <= FLOOR


async def test_each_update_is_healed(world: World, figures: Figures) -> None:
    """A, then B, A, B: the probe refuses what was loaded; copies derived anew pass, or a fresh
    server of the version, where the server has no call for that."""
    driven = world.first
    kept = figures["tensor parallel"]["updates"] = []
    for number, version in enumerate("BAB", start=1):
        scores, checksums = world.fresh(version)
        began_s = time.monotonic()
        with capture_logs() as records:
            told = await driven.activate(world.staged[version], number, probed_as=scores)
        found, after = await driven.checksums(), await driven.scores()
        stale = [one for one in records if one["event"] == "sglang_state_stale"]
        told |= {
            "version": version,
            "whole_s": round(time.monotonic() - began_s, 1),
            "remedy": [one["remedy"] for one in stale],
            "seen": [str(one["error"]) for one in stale],
            "short texts are a fresh load's": is_exact(after, scores),
            "against a fresh load": departure(after, scores),
            "checksums that differ": [key for key in checksums if found.get(key) != checksums[key]],
        }
        kept.append(told)
    assert all(one["remedy"] in (["restart"], ["rebuild"]) for one in kept)
    assert all("mean |delta log p|" in one["seen"][0] for one in kept)
    assert all(one["against a fresh load"]["mean"] <= FLOOR for one in kept)
    assert not any(one["checksums that differ"] for one in kept)
