"""Job fields of layout, launch and watchdog: what is refused, and in which words."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.trainer.jobs.abilities import lacking
from services.trainer.jobs.submission import Refused, check_abilities
from shared.job import Job

SITE_FIELDS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA")
SITE = dict.fromkeys(SITE_FIELDS, "$SITE_INTERFACE")
TWO_NODES = {"nodes": 2, "actor_nodes": 2, "rendezvous": {"host": "head"}}


def make_job(**sections: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 8},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"cluster": {"gpus_per_node": 2}, "actor": {"parallel": {"tensor": 4}}}, "divide 2 ranks"),
        ({"cluster": {"nodes": 3}}, "are not nodes 3"),
        ({"cluster": {"nodes": 2, "actor_nodes": 2}}, "need rendezvous.host"),
        ({"cluster": TWO_NODES}, "needs the site's values of actor.env.GLOO_SOCKET_IFNAME"),
        ({"actor": {"env": {"LD_PRELOAD": "/x.so"}}}, "LD_PRELOAD"),
        ({"actor": {"env": {"NCCL_ALGO": "$HOME"}}}, "pattern"),
        ({"actor": {"env": {"NCCL_ALGO": "a;b"}}}, "pattern"),
        ({"actor": {"watchdog": {"trace_file": "../../x"}}}, "pattern"),
        ({"actor": {"recompute": {"num_blocks": 2}}}, "needs mode selective or full"),
        ({"actor": {"kernels": {"mhc_pre": "triton"}}}, "no known mix"),
        ({"actor": {"max_tokens_per_gpu": 8}}, "leaves no room for a prompt"),
        (
            {
                "rollout": {"engine": "sglang", "sglang": {"tensor_parallel": 2}},
                "actor": {"replay": {"indexer": True}},
            },
            "actor.replay.indexer needs rollout.sglang.tensor_parallel 1, not 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    sections: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        make_job(**sections)


def test_two_nodes_with_their_sites_values_are_a_job() -> None:
    job = make_job(cluster=TWO_NODES | {"gpus_per_node": 2}, actor={"env": SITE})
    assert job.layout.world == 4
    assert job.actor.env.variables()["NCCL_IB_HCA"] == "$SITE_INTERFACE"


def test_the_longest_sample_is_what_both_budgets_allow() -> None:
    assert make_job(actor={"max_tokens_per_gpu": 32}).max_sample_tokens == 32
    assert make_job(actor={"max_tokens_per_gpu": 320}).max_sample_tokens == 64


def test_fields_without_an_engine_part_are_refused_by_name() -> None:
    assert lacking(make_job()) == []
    job = make_job(rollout={"engine": "sglang"}, actor={"kernels": {"experts": "triton"}})
    with pytest.raises(Refused) as refused:
        check_abilities(job)
    keys = [problem.key for problem in refused.value.problems]
    assert "actor.kernels.experts" in keys
