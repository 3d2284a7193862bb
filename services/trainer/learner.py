"""The torchrun ranks: a plain loop that does what the conductor asks, one operation at a time.

    conductor ──channel──> rank 0 ──broadcast──> all ranks ──> handler ──> rank 0 answers

Every rank runs every operation, because most of them are collective. An error that leaves the rank
as it was (`Rejected`, ValueError, WeightsCorrupt, `Unwritable`) is the answer; any other ends the
process.
"""

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from services.trainer.disk import Unwritable
from services.trainer.launch import (
    ADDRESS_VARIABLE,
    DETERMINISTIC_VARIABLE,
    TIMEOUT_VARIABLE,
    WATCHDOG_VARIABLE,
)
from services.trainer.watchdog.beacon import Beacon
from shared.channel import Request, SyncChannel
from shared.errors import Rejected, WeightsCorrupt
from shared.process import die_with_parent
from shared.telemetry import configure_logging

if TYPE_CHECKING:
    from services.trainer.engine.broadcast import Broadcast
    from services.trainer.engine.operations import Operations

log = structlog.get_logger()


def main() -> None:
    """`--channel` (or TANDEM_CHANNEL) is where the conductor listens; the rest is torchrun's.

    Only rank 0 needs it, which is on the conductor's node: other nodes know of no channel.
    """
    die_with_parent()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before anything imports torch
    parser = argparse.ArgumentParser(prog="services.trainer.learner")
    parser.add_argument("--channel", default=os.environ.get(ADDRESS_VARIABLE))
    address = parser.parse_args().channel
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and address is None:
        parser.error(f"give --channel or set {ADDRESS_VARIABLE}")
    configure_logging("trainer", replica=f"rank{rank}", rank=rank)
    _quieten_megatron()
    run(SyncChannel.connect(address) if rank == 0 else None)


def _quieten_megatron() -> None:
    """It warns of accelerator libraries that a CPU cannot have, and of its own defaults."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def run(channel: SyncChannel | None) -> None:
    """Join the other ranks and serve until `stop`; only rank 0 has the channel."""
    from services.trainer.engine.broadcast import Broadcast
    from services.trainer.engine.operations import Operations
    from services.trainer.megatron import parallel

    began_s = time.monotonic()
    beacon = _beacon()
    _restrict_operations()
    parallel.join(timeout_s=float(os.environ.get(TIMEOUT_VARIABLE, "600")))
    broadcast = Broadcast()
    operations = Operations(_progress_to(channel, beacon))
    log.info("rank_ready", ranks=broadcast.size, seconds=round(time.monotonic() - began_s, 2))
    try:
        while _serve_one(channel, broadcast, operations, beacon):
            pass
    finally:
        parallel.leave()
        if beacon is not None:
            beacon.close()


def _beacon() -> Beacon | None:
    """For the watchdog; None for a rank that was started without one."""
    folder = os.environ.get(WATCHDOG_VARIABLE)
    return Beacon(Path(folder), int(os.environ.get("RANK", "0"))) if folder else None


def _restrict_operations() -> None:
    if os.environ.get(DETERMINISTIC_VARIABLE):
        import torch

        torch.use_deterministic_algorithms(True)


def _serve_one(
    channel: SyncChannel | None,
    broadcast: "Broadcast",
    operations: "Operations",
    beacon: Beacon | None,
) -> bool:
    """One operation; False after `stop`."""
    request = channel.recv() if channel else None
    op, payload = broadcast.share((request.op, request.payload) if request else None)
    if beacon is not None:
        beacon.begin(op)
    error: Exception | None = None
    result: dict[str, Any] = {}
    try:
        if op == "stop":
            operations.close()
        else:
            result = operations.run(op, payload)
    except (Rejected, ValueError, WeightsCorrupt, Unwritable) as err:
        log.warning("operation_refused", op=op, error=str(err))
        error = err
    error = broadcast.first_error(error)
    if beacon is not None:
        beacon.begin("")
    if channel and request:
        _answer(channel, request, result, error)
    return op != "stop"


def _answer(
    channel: SyncChannel, request: Request, result: dict[str, Any], error: Exception | None
) -> None:
    if error is None:
        channel.reply(request.id, result)
    else:
        channel.fail(request.id, error)


def _progress_to(channel: SyncChannel | None, beacon: Beacon | None) -> Callable[[str, int], None]:
    def progress(phase: str, step: int) -> None:
        if beacon is not None:
            beacon.note(phase, step)
        if channel is not None:
            channel.notify("progress", {"phase": phase, "step": step})

    return progress


if __name__ == "__main__":
    main()
