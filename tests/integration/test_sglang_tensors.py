"""Tensors that a server is handed, or that are broadcast to it: taken whole, or the old serves."""

from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.sglang import reach
from services.rollout.engine.sglang.server import ServerFailed
from services.rollout.engine.sglang.spec import TransportName
from shared.errors import WeightsCorrupt
from tests.engine_contract import PROBE, reference_logprobs
from tests.integration.fake_sglang import FakeServer, Fault
from tests.integration.sglang_parts import install
from tests.integration.sglang_world import NEW, OLD, attached


@pytest.fixture
def sglang_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has what it needs of the package to hand tensors over."""
    install(monkeypatch)


@pytest.mark.usefixtures("sglang_parts")
@pytest.mark.parametrize("dialect", ["session", "post_process", "bare"])
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_tensors_reach_every_rank_in_each_dialect(
    transport: TransportName, dialect: str, tmp_path: Path
) -> None:
    """Two ranks: each takes a handle of its own, or is a member of the group."""
    fake = FakeServer(dialect=dialect, ranks=2)  # type: ignore[arg-type]
    async with attached(fake, tmp_path, transport=transport) as world:
        for stored in (OLD, NEW):
            number = await world.activate(stored)
            assert await world.sample() == [(number, 4)]
        assert "/update_weights_from_disk" not in fake.calls


@pytest.mark.usefixtures("sglang_parts")
async def test_a_server_elsewhere_meets_us_at_our_address_and_is_loaded_back_without_our_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_ends", lambda url: ("192.0.2.7", "192.0.2.8"))
    async with attached(FakeServer(), tmp_path, transport="gloo") as world:
        old = await world.activate(OLD)
        world.fake.faults = ["refuses"]
        with pytest.raises(WeightsCorrupt, match="partially updated"):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]
        world.fake.forget()
        await world.versions.recover()
        assert await world.sample() == [(old, 4)]
        assert {one.rpartition(":")[0] for one in world.fake.joined} == {"192.0.2.7"}
        assert "/update_weights_from_disk" not in world.fake.calls


async def test_memory_is_not_handed_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "_ends", lambda url: ("192.0.2.7", "192.0.2.8"))
    with pytest.raises(ServerFailed, match="is on another host, which cannot map"):
        async with attached(FakeServer(), tmp_path, transport="tensor"):
            pass


def test_this_host_is_here_and_another_is_not() -> None:
    for url in ("http://127.0.0.1:9", "http://127.0.0.9:9", "http://localhost:9/"):
        assert reach.is_here(url)
    assert reach.own_address("http://127.0.0.1:9") == "127.0.0.1"


TENSOR_FAULTS: list[Fault] = [
    "ignores_weights",
    "keeps_stale_copy",
    "says_no",
    "refuses",
    "drops_connection",
    "garbles_tables",
    "asserts",
    "dies",
]


@pytest.mark.usefixtures("sglang_parts")
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
async def test_a_fault_of_handed_over_tensors_is_refused_and_the_old_version_serves(
    transport: TransportName, fault: Fault, tmp_path: Path
) -> None:
    async with attached(FakeServer(), tmp_path, transport=transport) as world:
        old = await world.activate(OLD)
        world.fake.faults = [fault]
        with pytest.raises(WeightsCorrupt):
            await world.activate(NEW)
        assert await world.sample() == [(old, 4)]
        found = await world.engine.score_now(PROBE)
        np.testing.assert_allclose(found[0], reference_logprobs(OLD, PROBE[0]), atol=1e-5)
        assert world.fake.session == "none"
        number = await world.activate(NEW)
        assert await world.sample() == [(number, 4)]
