"""Megatron's data-parallel wrapper and optimiser around the actor.

Frozen parameters have no gradient buffer and no optimiser state, so nothing moves them, not even
weight decay. BF16 parameters get FP32 masters, FP32 ones change in place; gradients are FP32.
"""

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from services.trainer.megatron import cpu
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from shared.job import OptimizerSection


def wrap(
    model: DeepSeekV4, config: TransformerConfig, *, distributed_optimizer: bool = False
) -> DistributedDataParallel:
    """Gradients are summed, not averaged, over data-parallel ranks: losses carry global weights."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
    )
    wrapped = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = _finalize
    return wrapped


def _finalize(model: list[Any], num_tokens: Any, **kwargs: Any) -> None:
    """Reduce gradients; the schedule's token count is not used as a divisor."""
    finalize_model_grads(model, None, **kwargs)


def build_optimizer(
    wrapped: DistributedDataParallel, config: TransformerConfig, settings: OptimizerSection
) -> MegatronOptimizer:
    """AdamW with clipping by the global norm; vectors (norms, biases, sinks) are not decayed."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=wrapped.ddp_config.use_distributed_optimizer,
        ),
        [wrapped],
    )
    if cpu.needed():
        _fuse_on_cpu(optimizer)
    return optimizer


def _fuse_on_cpu(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW makes one pass over memory on a CPU if asked; Megatron does not ask."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"] = True


def set_learning_rate(optimizer: MegatronOptimizer, settings: OptimizerSection, step: int) -> float:
    """Linear warm-up to `learning_rate` over the first `warmup_steps`; `step` counts from 1."""
    share = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * share
    return settings.learning_rate * share


def gradients_are_finite(wrapped: DistributedDataParallel) -> bool:
    """Whether every gradient of this rank is a number; one pass over the flat buffers."""
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    return all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers)
