"""How every engine child begins: tied to its service, told what to start."""

import json
import os
from typing import Any

from shared.channel import Request, SyncChannel
from shared.process import die_with_parent
from shared.spans import recorder
from shared.telemetry import bind_process, configure_logging

IDS_VARIABLE = "TANDEM_LOG_IDS"  # what every record of the child carries: its replica and job


def told_spans(max_spans: int) -> dict[str, Any]:
    """Record so many spans from now on, or none any more; those since the last call."""
    own = recorder()
    if max_spans:
        own.start(max_spans)
    else:
        own.stop()
    spans, dropped = own.drain()
    return {"spans": [list(one) for one in spans], "dropped": dropped}


def begin(argv: list[str]) -> tuple[SyncChannel, Request]:
    """The channel that ADDRESS PARENT_PID name, and the service's request to start."""
    address, parent_pid = argv
    die_with_parent(int(parent_pid))
    configure_logging("rollout-engine")
    bind_process(**json.loads(os.environ.get(IDS_VARIABLE, "{}")))
    channel = SyncChannel.connect(address)
    first = channel.recv(60.0)
    if first is None or first.op != "start":
        raise SystemExit(f"the service was expected to start the engine, not {first}")
    return channel, first
