"""SGLang at tensor parallel 2: each rank's copy of the attention sinks follows every update.

    first:  A, with our class of model             every update is a fresh load's, nothing restarts
    second: B, with SGLang's own, all the same     what happens without ours

Each holds both GPUs, and a fresh load of either is the other's oracle. A stale copy shows in no
checksum; log-probabilities are off by a few thousandths, which no job's probe refuses.
"""

import importlib.util
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs

from services.rollout.engine.sglang.spec import TransportName
from services.rollout.engine.sglang.transports import Disk, transport_of
from tests.gpu.sglang_world import BOUND, Place, World, running
from tests.gpu.test_sglang import FLOOR, departure, is_exact

Figures = dict[str, Any]

STALE = 3e-3  # mean |delta log p|: above it the sinks are others'; noise is 5e-4, seen were 0.0101
_NUMBERS = itertools.count(1)  # of versions
UPDATES: dict[TransportName, str] = {"disk": "BAB", "tensor": "AB", "gloo": "AB"}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, here are {torch.cuda.device_count()}",
    ),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang"),
]


class Decoded:
    """What fresh loads of A and B decode, and what A decodes again."""

    def __init__(self, fresh: dict[str, np.ndarray], again: np.ndarray) -> None:
        self.fresh = fresh
        self.noise = departure([again], [fresh["A"]])
        self.floor = max(FLOOR, 2 * self.noise["mean"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> AsyncIterator[World]:
    ours = Place("disk", tensor_parallel=2)
    plain = Place("disk", tensor_parallel=2, is_plain=True)
    async with running(tmp_path_factory.mktemp("sglang"), ours, plain) as found:
        kept = figures.setdefault("tensor parallel", {})
        kept["seconds_to_first_token"] = [found.first.start_s, found.second.start_s]
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoded(world: World, figures: Figures) -> Decoded:
    """Before any update."""
    fresh = {"A": await world.first.decoded(), "B": await world.second.decoded()}
    found = Decoded(fresh, await world.first.decoded())
    figures["tensor parallel"]["decoded, same server twice"] = found.noise
    return found


async def test_noise_floor(world: World, decoded: Decoded, figures: Figures) -> None:
    kept = figures["tensor parallel"]
    again = await world.first.scores()
    kept["same server twice"] = departure(again, world.first.fresh)
    kept["short texts are the same"] = is_exact(again, world.first.fresh)
    kept["A against B"] = departure(world.first.fresh, world.second.fresh)
    assert kept["same server twice"]["mean"] <= FLOOR
    assert kept["A against B"]["mean"] > BOUND


async def test_only_our_class_tells_of_its_sinks_and_the_other_is_refused(
    world: World, figures: Figures
) -> None:
    figures["tensor parallel"]["refused without our class"] = world.second.refusal
    assert await world.first.versions.engine.server.client.sinks_departure() == 0
    assert await world.second.versions.engine.server.client.sinks_departure() is None
    assert world.first.refusal == ""
    assert "did not load the model of" in world.second.refusal


async def test_without_our_class_an_update_leaves_the_sinks_stale(
    world: World, decoded: Decoded, figures: Figures
) -> None:
    """Equal checksums, other scores, before SGLang 0.5.23. The old weights fit the old sinks."""
    first, second = world.first, world.second
    kept = figures["tensor parallel"]["without our class"] = {}
    await second.load(first.first, Disk())
    found = await second.checksums()
    differing = [key for key, one in first.fresh_checksums.items() if found.get(key) != one]
    kept["checksums that differ"] = [len(differing), len(first.fresh_checksums)]
    kept["against a fresh load"] = departure(await second.scores(), first.fresh)
    kept["decoded"] = departure([await second.decoded()], [decoded.fresh["A"]])
    await second.load(second.first, Disk())
    kept["back to the old version"] = departure(await second.scores(), second.fresh)
    assert not differing
    assert kept["against a fresh load"]["mean"] > STALE
    assert kept["back to the old version"]["mean"] <= FLOOR


@pytest.mark.parametrize("transport", UPDATES)
async def test_each_update_is_a_fresh_load(
    transport: TransportName, world: World, decoded: Decoded, figures: Figures
) -> None:
    """There and back: weights, copies, scores, and what CUDA graphs decode; no remedy needed."""
    driven = world.first
    driven.versions.transport = transport_of(transport)
    kept = figures["tensor parallel"].setdefault("updates", {})[transport] = []
    for version in UPDATES[transport]:
        scores, checksums = world.fresh(version)
        began_s = time.monotonic()
        with capture_logs() as records:
            told = await driven.activate(world.staged[version], next(_NUMBERS), probed_as=scores)
        found, after = await driven.checksums(), await driven.scores()
        told |= {
            "version": version,
            "whole_s": round(time.monotonic() - began_s, 1),
            "remedies": [one for one in records if one["event"] == "sglang_state_stale"],
            "largest difference of the copies": (
                await driven.versions.engine.server.client.sinks_departure()
            ),
            "short texts are a fresh load's": is_exact(after, scores),
            "against a fresh load": departure(after, scores),
            "decoded": departure([await driven.decoded()], [decoded.fresh[version]]),
            "checksums that differ": [key for key in checksums if found.get(key) != checksums[key]],
        }
        kept.append(told)
    assert not any(one["remedies"] or one["checksums that differ"] for one in kept)
    assert all(one["largest difference of the copies"] == 0 for one in kept)
    assert all(one["short texts are a fresh load's"] for one in kept)
    assert all(one["against a fresh load"]["mean"] <= FLOOR for one in kept)
    assert all(one["decoded"]["mean"] <= decoded.floor for one in kept)
    assert driven.versions.restarts.total == 0
