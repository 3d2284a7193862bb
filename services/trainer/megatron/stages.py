"""Transfers between pipeline stages that say whom they wait for."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from services.trainer.watchdog.waits import waiting

_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "tp_dp_cp", "dp"]


class StageTransfers(P2PCommunicator):
    """Megatron's, with the neighbours of each transfer noted while it lasts."""

    def _communicate(self, **asked: Any) -> Any:
        with waiting("pipeline transfer", self._needed(asked)):
            return super()._communicate(**asked)

    def _needed(self, asked: dict[str, Any]) -> list[int]:
        before = asked["recv_prev"] or asked["tensor_send_prev"] is not None
        after = asked["recv_next"] or asked["tensor_send_next"] is not None
        neighbours = ((self.prev_rank, before), (self.next_rank, after))
        return [int(rank) for rank, is_needed in neighbours if is_needed and rank is not None]


def stage_transfers(config: Any) -> dict[str, Any]:
    """Arguments of Megatron's schedule; none where there is one stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {}
    group = parallel_state.get_pipeline_model_parallel_group()
    return {
        "p2p_communicator": StageTransfers(group, config),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
    }
