"""The job files that ship are jobs: every key known, every value within its bounds."""

from pathlib import Path

import pytest

from services.trainer.jobs.abilities import lacking
from shared.job import Job, load_job_file
from shared.planner import Machine, plan
from tests.tiny_deepseek_v4 import FLASH

CHECKS_OF_AN_ENGINE = {"demo-sglang"}  # five steps, from which nobody learns what a policy can
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def load(name: str) -> Job:
    path = next(path for path in CONFIGS if path.stem == name)
    return Job.model_validate(load_job_file(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_job_is_valid_and_evaluates(path: Path) -> None:
    job = Job.model_validate(load_job_file(path))
    assert (job.eval is not None) == (path.stem not in CHECKS_OF_AN_ENGINE)


def test_the_demo_is_the_job_that_the_readme_describes() -> None:
    job = load("demo")
    assert (job.steps, job.sampling.groups_per_step, job.sampling.samples_per_prompt) == (60, 16, 8)
    assert job.eval is not None
    assert job.eval.every_steps == 10


def test_the_real_data_job_takes_its_files_from_data_root() -> None:
    job = load("real-data")
    assert job.eval is not None
    assert job.steps == 2
    paths = [job.data.path, job.eval.data.path]
    assert all(path is not None and path.startswith("$DATA_ROOT/") for path in paths)


def test_the_published_run_has_every_published_value() -> None:
    job = load("dsv4-flash-mi355x-4node")
    cluster, sampling, actor, sglang = job.cluster, job.sampling, job.actor, job.rollout.sglang
    nodes = (cluster.nodes, cluster.actor_nodes, cluster.rollout_nodes, cluster.gpus_per_node)
    assert nodes == (4, 2, 2, 8)
    assert (job.steps, job.algorithm.updates_per_batch) == (200, 1)
    assert (sampling.groups_per_step, sampling.samples_per_prompt) == (32, 8)
    assert (sampling.context_length, sampling.max_response_tokens) == (16384, 4096)
    assert actor.max_tokens_per_gpu == 8192
    assert (sglang.max_running_requests, sglang.max_total_tokens) == (48, 524288)
    parallel = actor.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.context) == (1, 4, 1)
    assert (parallel.expert, parallel.expert_tensor, parallel.last_stage_layers) == (4, 1, 10)
    assert job.layout.stage_sizes(43) == (11, 11, 11, 10)
    assert job.algorithm.correction.kind == "tis"
    assert sampling.dynamic
    assert sampling.oversampling > 1
    assert job.eval is not None
    assert (job.eval.suite, job.eval.every_steps) == ("aime-2024", 10)
    assert (job.eval.samples_per_problem, job.eval.grader) == (8, "aime")
    assert (actor.recompute.mode, actor.recompute.num_blocks) == ("full", None)
    assert actor.optimizer.offload.fraction == 1.0
    assert "FP8" in job.model.rollout_checkpoint
    assert actor.dtype == "bfloat16"
    assert "torch_dist" in (job.model.actor_checkpoint or "")
    assert job.name == "dsv4-flash-mi355x-4node"
    assert (cluster.rendezvous.host, cluster.rendezvous.port) == ("$SITE_HEAD", 29400)
    assert (job.mode, job.rollout.engine) == ("train", "sglang")
    assert (sampling.oversampling, job.checkpoint.every_steps) == (1.25, 10)


def test_the_published_run_sets_every_published_variable() -> None:
    actor = load("dsv4-flash-mi355x-4node").actor
    assert actor.env.variables() == {
        "NCCL_SOCKET_IFNAME": "$SITE_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME": "$SITE_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME": "$SITE_SOCKET_IFNAME",
        "NCCL_IB_HCA": "$SITE_IB_HCA",
        "NCCL_IB_GID_INDEX": "1",
        "GPU_MAX_HW_QUEUES": "2",
        "NCCL_P2P_NET_CHUNKSIZE": "262144",
    }
    assert actor.watchdog.variables("/runs/x") == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "200000",
        "TORCH_FR_BUFFER_SIZE": "200000",
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/x/watchdog/nccl_trace_rank_",
    }


@pytest.mark.parametrize("name", ["dsv4-flash-mi355x-4node", "dsv4-flash-h200"])
def test_the_cluster_presets_stop_well_above_the_published_drift(name: str) -> None:
    job, published = load(name), 0.09
    assert 2 * published < job.bounds.max_mean_abs_delta_logprob < 4 * published
    assert 2 * published < job.update.probe_max_mean_abs_delta < 4 * published


@pytest.mark.parametrize(
    ("name", "gigabytes", "host_gigabytes"),
    [("dsv4-flash-mi355x-4node", 288, 3000), ("dsv4-flash-h200", 141, 2000)],
)
def test_the_cluster_presets_fit_their_machines(
    name: str, gigabytes: int, host_gigabytes: int
) -> None:
    machine = Machine(gigabytes * 10**9, host_gigabytes * 10**9, gpus_per_node=8)
    assert lacking(load(name)) == []
    found = plan(FLASH, load(name), machine=machine)
    assert found.fits, found.problems
    assert found.headroom_bytes is not None
    assert found.headroom_bytes > 0.15 * gigabytes * 1e9
