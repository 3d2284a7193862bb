"""What every rank did for a profile, gathered at all of them, with what their clocks differ by."""

import os
import socket
import statistics
import time
from typing import Any

import msgpack

from services.trainer.engine.agreement import gather_bytes
from shared.spans import boot_id, recorder

_NUM_CLOCK_READINGS = 5


def spans_of_ranks(max_spans: int) -> list[dict[str, Any]]:
    """Record so many spans from now on, or none any more; what each rank has so far. Collective.

    `clock_ahead_ns`: this rank's monotonic clock less rank 0's; exactly 0 within one boot.
    """
    own = recorder()
    if max_spans:
        own.start(max_spans)
    else:
        own.stop()
    spans, dropped = own.drain()
    readings: list[int] = []
    for _ in range(_NUM_CLOCK_READINGS):
        gather_bytes(b"?")  # nobody leaves before all have come
        readings.append(time.monotonic_ns())
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "readings": readings,
        "spans": [list(one) for one in spans],
        "dropped": dropped,
    }
    ranks = [msgpack.unpackb(body) for body in gather_bytes(msgpack.packb(mine))]
    reference, boot = list(ranks[0]["readings"]), ranks[0]["boot_id"]
    for told in ranks:
        ahead = [mine - theirs for mine, theirs in zip(told["readings"], reference, strict=True)]
        del told["readings"]
        same = told["boot_id"] == boot
        told["clock_ahead_ns"] = 0 if same else round(statistics.median(ahead))
        told["clock_uncertainty_ns"] = 0 if same else max(ahead) - min(ahead)
    return ranks
