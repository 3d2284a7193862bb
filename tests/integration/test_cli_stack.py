"""`up` and `demo` with real processes: they come up, say what is wrong, and leave nothing."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
START_S = 100.0
STOP_S = 60.0


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", *argv],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """The lines up to the one that matches."""
    assert process.stdout is not None
    lines: list[str] = []
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        line = process.stdout.readline()
        assert line, f"it ended before {pattern!r}: {lines}"
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(f"not told in {START_S:g} s: {pattern!r}; {lines}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    """A process whose parent died first is a zombie until init takes it: that one is gone, too."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.timeout(240)
def test_up_drains_on_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    argv = ["up", "--rollout", "1", "--ports-from", "0", "--data-dir", str(tmp_path)]
    with started(*argv) as process:
        lines = told(process, "Ctrl-C stops all")
        ready = {line.split()[0] for line in lines if " ready " in line}
        assert ready == {"broker", "trainer", "rollout-0", "reward-0", "evaluator"}
        running = descendants(process)
        assert len(running) >= len(ready)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=STOP_S)
        assert process.returncode == 130
        assert gone(running)


@pytest.mark.timeout(240)
def test_killing_up_kills_all_that_it_started(tmp_path: Path) -> None:
    argv = ["up", "--rollout", "1", "--ports-from", "0", "--data-dir", str(tmp_path)]
    with started(*argv) as process:
        told(process, "Ctrl-C stops all")
        running = descendants(process)
        process.kill()
        process.wait()
        assert gone(running)


@pytest.mark.timeout(240)
def test_a_demo_whose_job_is_refused_fails_and_leaves_no_process(tmp_path: Path) -> None:
    argv = ["demo", "--rollout", "1", "--ports-from", "0", "--runs-dir", str(tmp_path)]
    with started(*argv, "--set", "reward.grader=maths") as process:
        told(process, "all are ready")
        running = descendants(process)
        rest, _ = process.communicate(timeout=STOP_S)
        assert process.returncode == 1
        assert 'reward.grader = "maths"' in rest
        assert "Traceback" not in rest
        assert gone(running)


def test_a_demo_on_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        base = busy.getsockname()[1]
        argv = ["demo", "--ports-from", str(base), "--runs-dir", str(tmp_path)]
        with started(*argv) as process:
            said, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 1
    assert said.count("\n") == 1
    assert f"Port {base} of the trainer is in use" in said
    assert not list(tmp_path.iterdir())
