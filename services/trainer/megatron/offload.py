"""AdamW whose FP32 masters and moments lie partly in host memory, on Megatron's hybrid optimiser.

Megatron moves gradients to the host, weights back and overlaps both with the work; this class says
what lies where. A parameter goes whole, and the host takes at least its fraction of all elements.
On a CPU "device" and host are one memory, so the same code runs and gives the same weights.
"""

from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from services.trainer.megatron import cpu
from shared.job_actor import OffloadSection


def configure(config: OptimizerConfig, offload: OffloadSection) -> None:
    """Have Megatron build `HostOffload`, with masters that only it holds.

    The precision-aware mode is what keeps Megatron from masters of its own on the device; all
    states stay FP32.
    """
    config.optimizer_cpu_offload = True
    config.optimizer_offload_fraction = offload.fraction
    config.overlap_cpu_optimizer_d2h_h2d = offload.overlap
    config.pin_cpu_grads = config.pin_cpu_params = not cpu.needed()
    config.use_precision_aware_optimizer = True
    config.__post_init__()
    for module in (megatron_optimizer, distrib_optimizer):
        module.HybridDeviceOptimizer = HostOffload


class HostOffload(HybridDeviceOptimizer):
    """Megatron's class, which cannot mix FP32 with BF16 parameters, nor load the states of both.

    It is made twice, of all parameters and then of this rank's shards, so nothing is copied before
    `place`. Both parts use torch's AdamW, and loading fills the tensors that exist.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        params = list(params)
        for group in params:
            for parameter in group["params"]:
                if not parameter.is_leaf:  # a shard of an FP32 parameter is a view of it
                    parameter.retain_grad()
        settings["gpu_optimizer_cls"] = settings["cpu_optimizer_cls"]
        super().__init__(params, **settings)

    def place(self) -> None:
        """Copy to the host what belongs there, and make the state: a checkpoint can only be read
        into (or written from) one that exists."""
        super()._init_sub_optimizers()
        for part in self.sub_optimizers:
            for group in part.param_groups:
                for master in group["params"]:
                    part.state[master] = {
                        "step": torch.zeros((), dtype=torch.float32, device=master.device),
                        "exp_avg": torch.zeros_like(master, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
                    }
        self._sync_sub_optimizers_state_to_hdo()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings of the groups; tensors follow one by one, since they are sharded."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            kept = {key: value for key, value in loaded.items() if key not in ("params", "step")}
            group.update(kept)

    def update_fp32_param_by_new_param(self) -> None:
        """Masters follow weights that were loaded into the model."""
        for parameter, master in self.param_to_inner_param.items():
            if master is not parameter:
                master.data.copy_(parameter.data)

    def _init_sub_optimizers(self) -> None:
        """Only by `place`."""

    def _register_load_state_dict_hooks(self) -> None:
        """Nothing moves when the state is loaded."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        sizes = [parameter.numel() for group in self.param_groups for parameter in group["params"]]
        wanted, moved = offload_fraction * sum(sizes), 0
        groups: tuple[list[Any], list[Any]] = ([], [])
        on_host: dict[Tensor, Tensor] = {}
        masters: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            parts: tuple[list[Tensor], list[Tensor]] = ([], [])
            for parameter in group["params"]:
                goes = moved < wanted
                master = _host_copy(parameter) if goes else parameter
                if parameter.dtype != torch.float32:
                    master = masters[parameter] = master if goes else parameter.detach().float()
                if goes:
                    moved += parameter.numel()
                    on_host[parameter] = master
                parts[0 if goes else 1].append(master)
            for found, part in zip(groups, parts, strict=True):
                if part:
                    found.append({**group, "params": part})
        return *groups, on_host, {master: one for one, master in on_host.items()}, masters

    def _set_sub_optimizer_grads(self) -> None:
        for parameter, master in self.param_to_inner_param.items():
            if master is parameter:
                parameter.grad = parameter.decoupled_grad
        super()._set_sub_optimizer_grads()


def _host_copy(parameter: Tensor) -> Tensor:
    """FP32; pinned where there is a device, so that copies need not wait."""
    copy = torch.empty(
        parameter.shape, dtype=torch.float32, device="cpu", pin_memory=not cpu.needed()
    )
    return copy.copy_(parameter.detach())
