"""One thread, Megatron's world of one, and the table of planted mistakes at the end."""

import os

# Before megatron is imported: its compiled helpers need a compiler and cost more than they save.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4 import block, rope
from shared.models.deepseek_v4.architecture import Architecture


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """What the trainer's model needs before it is built."""
    parallel.initialise(seed=1)
    yield
    parallel.leave()


@dataclass(slots=True)
class Findings:
    """Which check caught which planted mistake, by how much."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, mistake: str, side: str, caught: Mapping[str, float], where: str) -> None:
        checks = ", ".join(f"{check} {size:.1e}" for check, size in caught.items())
        self.rows.append((mistake, side, checks or "NOTHING", where))


_FINDINGS = pytest.StashKey[Findings]()


@pytest.fixture
def findings(request: pytest.FixtureRequest) -> Findings:
    return request.config.stash.setdefault(_FINDINGS, Findings())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table of planted mistakes: where, caught by which check at which size, and the walk."""
    found = config.stash.get(_FINDINGS, None)
    if found is None:
        return
    terminalreporter.section("planted mistakes: side, caught by (size), the walk's verdict")
    for mistake, side, checks, where in found.rows:
        terminalreporter.write_line(f"{mistake:<34} {side:<10} {checks:<36} {where}")


@pytest.fixture
def float64_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor's rotations are FP32 by design; the reference follows the dtype of its weights."""

    def turns(arch: Architecture, layer: int, like: Tensor) -> Tensor:
        frequencies = torch.tensor(arch.rope_frequencies(layer), dtype=torch.float64)
        angles = torch.outer(torch.arange(like.size(1), dtype=torch.float64), frequencies)
        return torch.polar(torch.ones_like(angles), angles)

    assert block.layer_rotations is rope.layer_rotations
    monkeypatch.setattr(block, "layer_rotations", turns)
