"""Ports, and what is said when the machine cannot run the stack."""

import asyncio
import io
import socket
from pathlib import Path

import pytest
from rich.console import Console

from services.cli import stack as cli_stack
from services.cli.stack import (
    MAX_REWARD,
    MAX_ROLLOUT,
    check_stack,
    choose_ports,
    stack_programs,
    tell_restarts,
)
from shared.local_stack import Stack
from shared.tasks import end


@pytest.mark.parametrize("base", [None, 0, 9000])
def test_each_process_has_a_port_of_its_own(base: int | None) -> None:
    ports = choose_ports(num_rollout=MAX_ROLLOUT, num_reward=MAX_REWARD, base=base)
    numbers = list(ports.by_name().values())
    assert len(set(numbers)) == len(numbers) == 3 + MAX_ROLLOUT + MAX_REWARD


def test_a_busy_port_is_one_sentence_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    ports = choose_ports(num_rollout=2, num_reward=1, base=0)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports.rollout[1]))
        busy.listen()
        with pytest.raises(SystemExit) as ended:
            check_stack(ports, min_memory_bytes=0)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"Port {ports.rollout[1]} of the rollout-1" in said
    assert "--ports-from" in said


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    ports = choose_ports(num_rollout=1, num_reward=1, base=0)
    with pytest.raises(SystemExit):
        check_stack(ports, min_memory_bytes=2**60)
    assert "GiB" in capsys.readouterr().err


def test_every_service_is_told_where_the_broker_is(tmp_path: Path) -> None:
    ports = choose_ports(num_rollout=2, num_reward=1, base=0)
    broker, services = stack_programs(ports, data_dir=tmp_path, runs_dir=tmp_path)
    assert getattr(broker, "name", "") == "broker"
    assert isinstance(services, list)
    assert [program.name for program in services] == [
        "trainer", "rollout-0", "rollout-1", "reward-0", "evaluator",
    ]  # fmt: skip
    assert all(f"redis://127.0.0.1:{ports.broker}/0" in program.argv for program in services)


async def test_a_restart_is_told_once_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_stack, "_POLL_S", 0.0)
    stack = Stack(tmp_path)
    stack.restarts |= {"trainer": 0, "rollout-0": 1}
    said = io.StringIO()
    telling = asyncio.create_task(tell_restarts(stack, Console(file=said, width=40)))
    await asyncio.sleep(0)  # it has begun: what was before is not told
    stack.restarts["rollout-0"] = 2
    for _ in range(50):
        await asyncio.sleep(0)
    await end(telling)
    log = tmp_path / "rollout-0.log"
    assert said.getvalue() == f"rollout-0 died and was restarted (2 so far); its log: {log}\n"
