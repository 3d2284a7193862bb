"""Megatron's data-parallel wrapper and optimiser around the actor.

Frozen parameters have no gradient buffer and no optimiser state, so nothing moves them, not even
weight decay. BF16 parameters get FP32 masters, FP32 ones change in place; gradients are FP32.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.transformer_config import TransformerConfig

from services.trainer.megatron import cpu, offload, states
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from shared.job_actor import OptimizerSection


def wrap(model: DeepSeekV4, config: TransformerConfig) -> DistributedDataParallel:
    """Gradients are summed, not averaged, over data-parallel ranks: losses carry global weights.

    The distributed optimiser is always on: it is the one that can save mixed BF16 and FP32
    parameters, and with one data-parallel rank it costs nothing.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
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
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    if settings.offload.fraction:
        offload.configure(optimizer_config, settings.offload)
    # Megatron confuses the order of parameters in a group that mixes dtypes; a setting that changes
    # nothing puts the FP32 ones in groups of their own.
    is_fp32 = ParamPredicate("is_fp32", lambda parameter: parameter.dtype == torch.float32)
    overrides = get_standard_config_overrides(optimizer_config)
    overrides[ParamKey(predicate=is_fp32)] = ParamGroupOverride(max_lr=settings.learning_rate)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], overrides)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, offload.HostOffload):
            _apply_decay_factors(part.optimizer)
            part.optimizer.place()
            states.install(part)
        elif isinstance(part.optimizer, torch.optim.AdamW):
            _apply_decay_factors(part.optimizer)
            _prepare(part.optimizer)
            states.install(part)
    for part in optimizer.chained_optimizers[:-1]:
        part._defer_param_sync = True  # else each of them gathers the weights of all
    return optimizer


def _apply_decay_factors(inner: torch.optim.Optimizer) -> None:
    """Else left to Megatron's own scheduler."""
    for group in inner.param_groups:
        group["weight_decay"] *= group["wd_mult"]


def _prepare(inner: torch.optim.AdamW) -> None:
    """Make the state now, because a checkpoint can only be read into (or written from) one that
    exists; and one pass over memory per step on a CPU, which Megatron does not ask for."""
    for group in inner.param_groups:
        group["fused"] = cpu.needed()
        for parameter in group["params"]:
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """After loading, all parameters share one `step` tensor, which torch would advance for each."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def set_learning_rate(optimizer: MegatronOptimizer, settings: OptimizerSection, step: int) -> float:
    """Linear warm-up to `learning_rate` over the first `warmup_steps`; `step` counts from 1."""
    share = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * share
    return settings.learning_rate * share


def gradients_are_finite(wrapped: DistributedDataParallel) -> bool:
    """Whether all ranks' gradients, and the norm that clipping divides by, are numbers.

    The same answer everywhere, and no later than the norm itself would overflow.
    """
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return bool(torch.isfinite(squares))
