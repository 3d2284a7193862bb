"""The five kinds of process as programs of the local stack, and the ports they use."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shared.broker import HOST, broker, broker_url
from shared.local_stack import Program, Stack
from shared.process import check_machine, exit_with, free_port, port_in_use
from shared.readiness import http_ready

MAX_ROLLOUT, MAX_REWARD = 16, 8  # as many as there are ports between one service's and the next
DEFAULT_BASE, DEFAULT_BROKER = 8700, 16379
MIN_MEMORY_BYTES = 3 * 2**30

# A program's start includes importing torch on a busy machine; its end includes draining.
_READY_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Ports:
    broker: int
    trainer: int
    rollout: list[int]
    reward: list[int]
    evaluator: int

    @property
    def trainer_url(self) -> str:
        return f"http://{HOST}:{self.trainer}"

    def by_name(self) -> dict[str, int]:
        return {
            "broker": self.broker,
            "trainer": self.trainer,
            **{f"rollout-{i}": port for i, port in enumerate(self.rollout)},
            **{f"reward-{i}": port for i, port in enumerate(self.reward)},
            "evaluator": self.evaluator,
        }


def choose_ports(*, num_rollout: int, num_reward: int, base: int | None) -> Ports:
    """The default ports; or those from `base` on; or, with `base` 0, any that are free."""
    if base == 0:
        free = _free_ports(3 + num_rollout + num_reward)
        return Ports(free[0], free[1], free[3 : 3 + num_rollout], free[3 + num_rollout :], free[2])
    first = DEFAULT_BASE if base is None else base
    return Ports(
        broker=DEFAULT_BROKER if base is None else base + 50,
        trainer=first,
        rollout=[first + 10 + i for i in range(num_rollout)],
        reward=[first + 30 + i for i in range(num_reward)],
        evaluator=first + 40,
    )


def _free_ports(num: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < num:
        ports.add(free_port())
    return list(ports)


def check_stack(ports: Ports, *, min_memory_bytes: int = MIN_MEMORY_BYTES) -> None:
    """End with one sentence when this machine cannot run the stack; nothing was started yet."""
    check_machine(min_memory_bytes)
    for name, port in ports.by_name().items():
        if port_in_use(HOST, port):
            exit_with(
                f"Port {port} of the {name} is in use: stop what uses it, or choose other ports "
                f"with --ports-from BASE (0 takes any that are free)."
            )


def stack_programs(
    ports: Ports, *, data_dir: Path, runs_dir: Path
) -> list[Program | Sequence[Program]]:
    """The broker first, then all services at once; each is told only where the broker is.

    The queue of jobs is the stack's own, as its broker is: what an earlier stack left unfinished
    in `runs_dir` is not taken up by this one.
    """
    runs = ["--runs-dir", str(runs_dir.resolve())]
    queue = ["--queue-dir", str(data_dir.resolve())]
    services = [_service("trainer", "trainer", ports.trainer, ports, [*runs, *queue])]
    services += [
        _service("rollout", f"rollout-{i}", port, ports) for i, port in enumerate(ports.rollout)
    ]
    services += [
        _service("reward", f"reward-{i}", port, ports) for i, port in enumerate(ports.reward)
    ]
    services.append(_service("evaluator", "evaluator", ports.evaluator, ports, runs))
    return [broker(data_dir / "broker", ports.broker), services]


def offline_programs(
    ports: Ports, *, data_dir: Path, runs_dir: Path, data_roots: Sequence[Path]
) -> list[Program | Sequence[Program]]:
    """What the evaluation of a bare checkpoint needs: a broker, graders, and an evaluator."""
    roots = json.dumps([str(root.resolve()) for root in data_roots])
    more = ["--runs-dir", str(runs_dir.resolve()), "--data-roots", roots]
    return [
        broker(data_dir / "broker", ports.broker),
        [
            _service("reward", "reward-0", ports.reward[0], ports),
            _service("evaluator", "evaluator", ports.evaluator, ports, more),
        ],
    ]


async def tell_restarts(stack: Stack, console: Console) -> None:
    """For as long as the stack runs: a line for each program that died and is started again."""
    told = dict(stack.restarts)
    while True:
        for name, num in stack.restarts.items():
            if num > told.get(name, 0):
                line = f"{name} died and was restarted ({num} so far)"
                console.print(f"{line}; its log: {stack.log_path(name)}", soft_wrap=True)
        told = dict(stack.restarts)
        await asyncio.sleep(_POLL_S)


def _service(
    service: str, replica: str, port: int, ports: Ports, more: Sequence[str] = ()
) -> Program:
    own = ["--host", HOST, "--port", str(port), "--replica", replica]
    return Program(
        name=replica,
        argv=[
            *(sys.executable, "-m", f"services.{service}"),
            *own,
            *("--redis-url", broker_url(ports.broker)),
            *more,
        ],
        env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"},
        ready=http_ready(f"http://{HOST}:{port}/readyz"),
        ready_s=_READY_S,
        stop_s=_STOP_S,
    )
