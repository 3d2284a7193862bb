"""Smallest changes, and which layouts a model can have."""

from dataclasses import replace

import pytest

from shared.parallel import Layout
from shared.planner.advice import best_layout, fitting_layouts, layouts, smallest_change
from shared.planner.plan import plan_setup
from shared.planner.setup import GB, Machine
from tests.tiny_deepseek_v4 import FLASH
from tests.unit.shared.planner.test_plan import MI355X, PUBLISHED


def changes(machine: Machine = MI355X, **settings) -> dict[str, str]:
    found = plan_setup(FLASH, replace(PUBLISHED, **settings), machine)
    assert not found.fits
    advice = smallest_change(FLASH, found)
    assert advice is not None
    assert advice.plan.fits
    return advice.changes


def test_one_field_is_smaller_than_two() -> None:
    assert changes(recompute="none") == {"actor.recompute.mode": "selective"}
    assert changes(offload=0.0) == {"actor.optimizer.offload.fraction": "0.5"}
    assert changes(offload=0.0, recompute="none") == {
        "actor.recompute.mode": "selective",
        "actor.optimizer.offload.fraction": "0.75",
    }


def test_a_full_host_gets_less_of_the_state() -> None:
    small = replace(MI355X, host_bytes=2000 * GB)
    assert changes(small) == {"actor.optimizer.offload.fraction": "0.75"}


def test_copies_for_checkpoints_go_before_the_layout() -> None:
    assert changes(background_saves=True) == {"checkpoint.background": "false"}


@pytest.mark.parametrize(("gigabytes", "gpus"), [(80, 40), (110, 24)])
def test_nodes_come_last_and_one_by_one(gigabytes: int, gpus: int) -> None:
    small = Machine(gpu_bytes=gigabytes * GB, host_bytes=2000 * GB, gpus_per_node=8)
    found = changes(small)
    assert found.keys() == {"GPUs", "actor.parallel"}  # recompute and offload are as they were
    assert found["GPUs"] == str(gpus)
    fewer = replace(PUBLISHED, layout=Layout(world=gpus - 8))
    assert best_layout(FLASH, fewer, small) is None


def test_the_published_layout_is_among_the_best_of_its_gpus() -> None:
    fitting = fitting_layouts(FLASH, PUBLISHED, MI355X)
    assert PUBLISHED.layout in [one.setup.layout for one in fitting[:5]]
    best = best_layout(FLASH, PUBLISHED, MI355X)
    assert best is not None
    assert best.headroom_bytes > 0.15 * 288 * GB
    # On half the memory nothing does, whatever is recomputed or offloaded.
    assert fitting_layouts(FLASH, PUBLISHED, replace(MI355X, gpu_bytes=110 * GB)) == []


def test_layouts_are_cut_as_evenly_as_layers_allow() -> None:
    sizes = {one.stage_sizes(43) for one in layouts(FLASH, 8, gpus_per_node=8)}
    assert (11, 11, 11, 10) in sizes
    assert (22, 21) in sizes
