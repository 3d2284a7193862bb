"""Ports, memory, and children that must not outlive their parents."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import process
from shared.process import (
    available_cores,
    available_memory_bytes,
    check_machine,
    exit_with,
    free_port,
    kill_marked,
    port_in_use,
)

ROOT = Path(__file__).parents[3]


def test_port_in_use_is_seen():
    port = free_port()
    assert not port_in_use("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert port_in_use("127.0.0.1", port)


def test_too_little_memory_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        check_machine(2**60)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "Tandem needs 1073741824.0 GiB of free memory for this; "
    )


def test_old_python_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(process, "MIN_PYTHON", (4, 0))
    with pytest.raises(SystemExit):
        check_machine(0)
    assert "Tandem needs Python 4.0 or newer; this is Python 3." in capsys.readouterr().err


def test_enough_is_silent(capsys):
    check_machine(2**20)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("limit", "used", "expected"), [("max", 0, None), (2**20, 2**19, 2**19)])
def test_memory_is_bounded_by_the_container(tmp_path, monkeypatch, limit, used, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    monkeypatch.setattr(process, "_CGROUP", tmp_path)
    available = available_memory_bytes()
    assert available == expected if expected is not None else available > 2**20


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 64),
        ("max 100000", 64),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("10000000 1000", 64),
    ],
)
def test_cores_are_bounded_by_the_container(tmp_path, monkeypatch, limit, expected):
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(process, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert available_cores() == expected


def test_exit_with_writes_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        exit_with("No.")
    assert (ended.value.code, capsys.readouterr().err) == (1, "No.\n")


def test_child_of_a_dead_parent_dies():
    child = (
        "import os, sys, time; from shared.process import die_with_parent;"
        "die_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(100)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE
    ) as process_:
        assert process_.stdout is not None
        pid = int(process_.stdout.readline())
        process_.kill()
    _wait_until_gone(pid)


def test_child_whose_parent_is_already_gone_ends_itself():
    code = "from shared.process import die_with_parent; die_with_parent(1 << 30); print('lives')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_marked_processes_are_killed_and_no_others():
    def sleeper(mark):
        return subprocess.Popen(["sleep", "100"], env={**os.environ, "TRIAL_MARK": mark})

    with sleeper("a/1") as marked, sleeper("a/12") as other:
        try:
            kill_marked("TRIAL_MARK", "a/1")
            assert marked.wait(timeout=60) == -9
            assert other.poll() is None
        finally:
            other.kill()


def _wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        assert time.monotonic() < deadline_s, f"process {pid} still lives"
        time.sleep(0.02)
