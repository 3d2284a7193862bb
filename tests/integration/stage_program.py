"""Ranks that are stages of a pipeline, without a model: a step passes tensors on and back.

Each stage receives and sends the way that a training step does.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from services.trainer.megatron import cpu
from services.trainer.megatron.stages import StageTransfers
from tests.integration.rank_program import COMPUTE_S, NUM_EXCHANGES, main

SHAPE = (2, 1, 3)  # stages tell each other three sizes


def pass_on(step: int, group: Any) -> int:
    """The sum of what arrived."""
    config = ModelParallelConfig(
        pipeline_dtype=torch.float32, variable_seq_lengths=True, batch_p2p_comm=True
    )
    stages = StageTransfers(group, config)
    is_first, is_last = stages.is_pp_first_stage, stages.is_pp_last_stage
    for _ in range(NUM_EXCHANGES):
        arrived = stages.recv_forward(SHAPE, is_first)
        sent = torch.full(SHAPE, float(step)) if arrived is None else arrived.detach()
        time.sleep(COMPUTE_S)
        stages.send_forward(sent, is_last)
        grad = stages.recv_backward(SHAPE, is_last)
        stages.send_backward(sent if grad is None else grad, is_first)
    dist.barrier(group)
    return int(sent.sum())


if __name__ == "__main__":
    cpu.install()
    main(pass_on)
