"""Two hosts made of network namespaces: ranks of both meet, lose each other, and go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.trainer.events import EVENTS_FILE
from tests.integration.head_program import NUM_STEPS

HEAD, NODE = "10.231.77.1", "10.231.77.2"
PORT = 8700


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is not installed"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "this kernel or container allows no namespaces"


pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(_why_not() is not None, reason=str(_why_not())),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """Two namespaces with a cable between them; `head0` and `node0` are its ends."""

    def __init__(self) -> None:
        self._names = [f"tandem-{name}-{os.getpid()}" for name in ("head", "node")]
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in self._names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        head, node = self._names
        cable = ["link", "add", "cable0", "netns", head, "type", "veth"]
        ip(*cable, "peer", "name", "cable0", "netns", node)
        for name, address in ((head, HEAD), (node, NODE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")

    def start(
        self, host: int, *module: str, log: Path, own_folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a module on one host, which has a name of its own, and of `own_folder` a copy of its
        own, empty."""
        argv = ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "--mount", "sh", "-c"]
        script = f'hostname host{host}; exec "$@"'
        if own_folder is not None:
            script = f"mount -t tmpfs none '{own_folder}'; {script}"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*argv, script, "sh", sys.executable, "-m", *module],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._processes.append(process)
        return process

    def cable(self, state: str) -> None:
        ip("-n", self._names[1], "link", "set", "cable0", state)

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self._names:
            ip("netns", "delete", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


def test_a_cut_cable_is_diagnosed_and_the_job_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    arguments = (str(run_dir), HEAD, str(PORT), "cable0")
    log = tmp_path / "log"
    head = hosts.start(0, "tests.integration.head_program", *arguments, log=log)
    hosts.start(1, "tests.integration.node_program", f"http://{HEAD}:{PORT}", log=log)

    _until(lambda: _step(run_dir, rank=3) == 3, head, log, within_s=120)
    hosts.cable("down")
    _until(lambda: "ranks_stalled" in _events(run_dir), head, log, within_s=60)
    hosts.cable("up")
    head.wait(120)

    result = json.loads((run_dir / "result.json").read_text())
    assert (result["step"], result["sum"]) == (NUM_STEPS, 4 * sum(range(NUM_STEPS + 1)))
    events = _events(run_dir)
    assert list(events) == ["checkpoint_saved", "ranks_stalled", "rank_restarted", "replayed"]
    stalled = events["ranks_stalled"]
    assert stalled["waiting"]["collective"] == "gloo:all_to_all"
    assert stalled["step"] == 3
    assert events["replayed"]["steps"] == [2, 3]


def test_a_node_that_does_not_share_the_run_folder_is_named(hosts: Hosts, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    arguments = (str(run_dir), HEAD, str(PORT), "cable0")
    log, node_log = tmp_path / "log", tmp_path / "node_log"
    head = hosts.start(0, "tests.integration.head_program", *arguments, log=log)
    node = ("tests.integration.node_program", f"http://{HEAD}:{PORT}", "1.0")
    hosts.start(1, *node, log=node_log, own_folder=run_dir)
    assert head.wait(60) == 1
    assert f"node 1 starts no ranks: {run_dir} here is not the conductor's" in log.read_text()


def test_ranks_that_die_at_their_start_on_another_node_are_not_waited_for(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Those of the first node would wait for them until the rendezvous' time limit."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    arguments = (str(run_dir), HEAD, str(PORT), "cable0")
    log, node_log = tmp_path / "log", tmp_path / "node_log"
    head = hosts.start(0, "tests.integration.head_program", *arguments, log=log)
    node = ("tests.integration.node_program", f"http://{HEAD}:{PORT}", "30.0")
    hosts.start(1, *node, "tests.integration.no_such_ranks", log=node_log)
    assert head.wait(60) == 1
    assert "node 1: its torchrun ended with code 1; " in log.read_text()
    assert "No module named tests.integration.no_such_ranks" in log.read_text()


def _until(
    holds: Callable[[], bool], head: subprocess.Popen[bytes], log: Path, *, within_s: float
) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        said = log.read_text()[-3000:]
        assert head.poll() is None, f"the conductor ended: {said}"
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {said}"
        time.sleep(0.02)


def _step(run_dir: Path, *, rank: int) -> int:
    path = run_dir / "watchdog" / f"rank{rank}.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def _events(run_dir: Path) -> dict[str, dict]:
    path = run_dir / EVENTS_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    bodies = [json.loads(line) for line in lines]
    return {body["name"]: body["fields"] for body in bodies}
