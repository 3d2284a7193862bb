"""The torchrun ranks: a plain loop that does what the conductor asks, one operation at a time.

    conductor ──channel──> rank 0 ──broadcast──> all ranks ──> handler ──> rank 0 answers

Every rank runs every operation, because most of them are collective. An error that leaves the rank
as it was (`Rejected`, ValueError, WeightsCorrupt) is the answer; any other ends the process.
"""

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from shared.channel import Request, SyncChannel
from shared.errors import Rejected, WeightsCorrupt
from shared.process import die_with_parent
from shared.telemetry import configure_logging

if TYPE_CHECKING:
    from services.trainer.engine.broadcast import Broadcast
    from services.trainer.engine.operations import Operations

log = structlog.get_logger()
ADDRESS_VARIABLE = "TANDEM_CHANNEL"


def main() -> None:
    """`--channel` (or TANDEM_CHANNEL) is where the conductor listens; the rest is torchrun's."""
    die_with_parent()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before anything imports torch
    parser = argparse.ArgumentParser(prog="services.trainer.learner")
    parser.add_argument("--channel", default=os.environ.get(ADDRESS_VARIABLE))
    address = parser.parse_args().channel
    if address is None:
        parser.error(f"give --channel or set {ADDRESS_VARIABLE}")
    rank = int(os.environ.get("RANK", "0"))
    configure_logging("trainer", replica=f"rank{rank}")
    _quieten_megatron()
    channel = SyncChannel.connect(address) if rank == 0 else None
    run(channel)


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
    parallel.join()
    broadcast = Broadcast()
    operations = Operations(_progress_to(channel))
    log.info("rank_ready", ranks=broadcast.size, seconds=round(time.monotonic() - began_s, 2))
    try:
        while _serve_one(channel, broadcast, operations):
            pass
    finally:
        parallel.leave()


def _serve_one(
    channel: SyncChannel | None, broadcast: "Broadcast", operations: "Operations"
) -> bool:
    """One operation; False after `stop`."""
    request = channel.recv() if channel else None
    op, payload = broadcast.share((request.op, request.payload) if request else None)
    error: Exception | None = None
    result: dict[str, Any] = {}
    try:
        if op != "stop":
            result = operations.run(op, payload)
    except (Rejected, ValueError, WeightsCorrupt) as err:
        log.warning("operation_refused", op=op, error=str(err))
        error = err
    error = broadcast.first_error(error)
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


def _progress_to(channel: SyncChannel | None) -> Callable[[str, int], None]:
    def progress(phase: str, step: int) -> None:
        if channel is not None:
            channel.notify("progress", {"phase": phase, "step": step})

    return progress


if __name__ == "__main__":
    main()
