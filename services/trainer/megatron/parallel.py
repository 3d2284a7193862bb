"""Process groups of one rank: torch.distributed, Megatron's parallel state and its generators.

The environment (RANK, WORLD_SIZE, MASTER_ADDR, …) is torchrun's; a process without it is a world of
one, which tools and tests use.
"""

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from services.trainer.megatron import cpu
from shared.parallel import Layout


def join(*, timeout_s: float = 600.0) -> None:
    """Join the world of ranks; a second call in one process changes nothing."""
    cpu.install()
    if dist.is_initialized():
        return
    backend = "gloo" if cpu.needed() else "nccl"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    if not cpu.needed():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def initialise(*, seed: int, layout: Layout | None = None, timeout_s: float = 600.0) -> None:
    """Join, build Megatron's groups and seed its generators; again only seeds.

    `timeout_s` is the longest wait of a collective, in whole minutes in Megatron's groups.

    ValueError if there are not as many ranks as `layout` has; None is a world of one.
    """
    join(timeout_s=timeout_s)
    layout = Layout() if layout is None else layout
    if layout.world != num_ranks():
        raise ValueError(f"{layout} has {layout.world} ranks, {num_ranks()} were started")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
        )
    model_parallel_cuda_manual_seed(seed)


def num_ranks() -> int:
    return dist.get_world_size()


def leave() -> None:
    """Destroy the groups, so that a process may end (or a test start over) without complaint."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
