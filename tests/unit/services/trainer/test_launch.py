"""torchrun's commands and the environment of ranks, for one node and several."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.trainer.launch import Launch, LaunchBoard, Refusal
from shared.job import Job, load_job_file

PUBLISHED = Path(__file__).parents[4] / "configs" / "dsv4-flash-mi355x-4node.toml"


def make_job(**actor: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 64, "max_response_tokens": 8},
            "cluster": {"gpus_per_node": 2},
            "actor": actor,
        }
    )


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_HEAD", "10.0.0.1")
    monkeypatch.setenv("SITE_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("SITE_IB_HCA", "mlx5_0,mlx5_1")


def test_the_published_run_starts_eight_ranks_on_each_of_two_nodes(
    site: None, tmp_path: Path
) -> None:
    launch = Launch.of(Job.model_validate(load_job_file(PUBLISHED)), tmp_path, number=1)
    command = " ".join(launch.command(1))
    assert "--nnodes 2 --nproc-per-node 8" in command
    assert "--node-rank 1 --master-addr 10.0.0.1 --master-port 29400" in command
    assert command.endswith("-m services.trainer.learner")
    variables = launch.variables(1)
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert variables["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    assert variables["TORCH_FR_BUFFER_SIZE"] == "200000"
    file = f"{tmp_path}/watchdog/nccl_trace_rank_"
    assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == file
    assert launch.environment["NCCL_SOCKET_IFNAME"] == "$SITE_SOCKET_IFNAME"  # each node's own
    assert Launch.model_validate_json(launch.model_dump_json()) == launch


def test_a_site_value_that_is_not_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\$SITE_HEAD: this machine's environment does not set"):
        Launch.of(Job.model_validate(load_job_file(PUBLISHED)), tmp_path, number=1)


def test_one_node_meets_at_a_free_port(tmp_path: Path) -> None:
    launch = Launch.of(make_job(num_threads=3), tmp_path, number=1)
    assert f"--rdzv-endpoint 127.0.0.1:{launch.port}" in " ".join(launch.command(0))
    assert launch.environment["OMP_NUM_THREADS"] == "3"
    assert "CUBLAS_WORKSPACE_CONFIG" not in launch.environment


def test_deterministic_jobs_restrict_the_libraries(tmp_path: Path) -> None:
    chosen = make_job(deterministic=True, env={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    found = Launch.of(chosen, tmp_path, number=1).environment
    assert (found["TANDEM_DETERMINISTIC"], found["CUBLAS_WORKSPACE_CONFIG"]) == ("1", ":16:8")


async def test_the_board_numbers_starts_and_records_them_before_a_node_can_ask(
    tmp_path: Path,
) -> None:
    board = LaunchBoard()
    first, second = (board.post(make_job(), tmp_path) for _ in range(2))
    assert first.number < second.number
    assert second.shares_folder()
    assert not first.shares_folder()
    assert not second.model_copy(update={"run_dir": str(tmp_path / "other")}).shares_folder()
    board.clear()
    assert board.current is None


async def test_only_a_refusal_of_the_current_start_counts(tmp_path: Path) -> None:
    board = LaunchBoard()
    numbers = [board.post(make_job(), tmp_path).number for _ in range(2)]
    waiting = asyncio.create_task(board.refused())
    board.refuse(Refusal(number=numbers[0], node=1, reason="an old one"))
    for reason in ("first", "second"):
        board.refuse(Refusal(number=numbers[1], node=2, reason=reason))
    assert (await asyncio.wait_for(waiting, 60)).reason == "first"


def test_a_node_sets_no_variable_that_is_not_a_ranks(tmp_path: Path) -> None:
    launch = Launch.of(make_job(), tmp_path, number=1).model_dump()
    launch["environment"]["LD_PRELOAD"] = "/tmp/x.so"
    with pytest.raises(ValueError, match="LD_PRELOAD: no variable of a rank"):
        Launch.model_validate(launch)
