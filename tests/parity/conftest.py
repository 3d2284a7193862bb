"""One thread, Megatron's world of one, and the table of planted mistakes at the end."""

import os

# Before megatron is imported: its compiled helpers need a compiler and cost more than they save.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from collections.abc import Iterator

import pytest
import torch

from services.trainer.megatron import parallel


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """What the trainer's model needs before it is built."""
    parallel.initialise(seed=1)
    yield
    parallel.leave()
