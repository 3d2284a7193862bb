"""What NCCL says on one GPU: its recorder's dump, and two members that share the GPU.

One GPU cannot hold two ranks of a group, so nothing arrives here; errors must come at once all the
same, with NCCL's reason. What does arrive is tested on two GPUs (`test_transports`).
"""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.trainer.watchdog.beacon import Beacon
from services.trainer.watchdog.diagnosis import diagnose
from services.trainer.watchdog.watch import Watch
from shared.errors import DeadlineExceeded
from shared.job_actor import WatchdogSection
from shared.process import free_port
from shared.weights.group import send_shards
from shared.weights.manifest import Manifest, ShardEntry
from shared.weights.protocol import GroupTransfer
from tests.integration.rollout_world import write_version

Figures = dict[str, Any]
CYCLES = 20_000_000_000  # of a GPU that is busy for about ten seconds
BOUND_S = 60.0


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in WatchdogSection().variables(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.timeout(120)
async def test_the_recorder_tells_a_collective_that_waits(tmp_path: Path, figures: Figures) -> None:
    """It cannot begin while the GPU is busy; the beacon's thread reads it meanwhile."""
    beacon = Beacon(tmp_path, 0)
    beacon.begin("train_step")
    beacon.note("forward_backward", 3)
    data = torch.ones(4, device="cuda")
    dist.all_reduce(data)
    torch.cuda.synchronize()
    watch = Watch(tmp_path, num_ranks=2, stall_s=1.0)
    torch.cuda._sleep(CYCLES)
    dist.all_reduce(data)
    found = await watch.diagnosis(1.0)
    trace = watch._traces((tmp_path / "dump.request").read_text())[0]
    figures["recorder"] = {"entries": trace["entries"], "waiting": found.document()["waiting"]}
    torch.cuda.synchronize()
    beacon.close()
    assert found.waiting is not None
    assert found.waiting.collective == "nccl:all_reduce"
    assert trace["last"]
    of_two = trace | {"groups": {key: [0, 1] for key in trace["groups"]}}
    missing = diagnose({}, {0: of_two}, {1: "stopped (SIGSTOP)"}, quiet_s=1.0).waiting
    assert missing is not None
    assert missing.missing == (1,)


@pytest.mark.usefixtures("alone")
def test_which_formats_travel(figures: Figures) -> None:
    """E8M0, the scales' own, may not; everything else of a release does."""
    told = figures["formats over NCCL"] = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.int64):
        data = torch.zeros(64, dtype=torch.uint8, device="cuda").view(dtype)
        try:
            dist.broadcast(data, 0)
            told[str(dtype)] = "travels"
        except (RuntimeError, ValueError, TypeError) as err:
            told[str(dtype)] = str(err).splitlines()[0][:200]
    assert told["torch.float8_e4m3fn"] == "travels"


@pytest.mark.timeout(120)
def test_two_members_on_one_gpu_are_told_why(tmp_path: Path, figures: Figures) -> None:
    staged = tmp_path / "staged"
    manifest = write_version(staged, {"a": torch.arange(1000)}, 1)
    group = GroupTransfer(
        name="v1",
        backend="nccl",
        host="127.0.0.1",
        port=free_port(),
        rank=0,
        members=["rank 0", "rollout-0"],
        deadline_s=BOUND_S,
    )
    other = group.model_copy(update={"rank": 1}).model_dump_json()
    command = [sys.executable, "-m", "tests.gpu.group_member", str(staged), str(tmp_path / "o")]
    with (tmp_path / "log").open("wb") as log, Popen([*command, other], stderr=log) as member:
        error = _error_of(group, manifest)
        code = member.wait(BOUND_S)
    figures["two members on one GPU"] = {"seconds": error[1], "error": error[0], "code": code}
    assert "Duplicate GPU" in error[0]
    assert error[1] < BOUND_S
    assert code


def _error_of(group: GroupTransfer, manifest: Manifest) -> tuple[str, float]:
    """What the sender is told, and after how many seconds; in a thread, as a hang is a failure."""
    found: list[tuple[str, float]] = []

    def read(shard: ShardEntry) -> torch.Tensor:
        return torch.zeros(shard.num_bytes, dtype=torch.uint8)

    def send() -> None:
        began_s = time.monotonic()
        try:
            send_shards(group, manifest, read)
        except DeadlineExceeded as err:
            found.append((str(err), round(time.monotonic() - began_s, 1)))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(BOUND_S + 20.0)
    assert found, "the sender hangs, or believes that all went well"
    return found[0]
