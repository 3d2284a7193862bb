"""A rank's side: says what it is doing, and dumps its collectives and stacks when asked.

A thread of its own answers, because the rank's main thread may be inside a collective for good.
"""

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from services.trainer.watchdog import waits

REQUEST_FILE = "dump.request"
POLL_S = 0.25


class Beacon:
    """Of rank `rank`; the folder is made if it is missing."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank = folder, rank
        self._place = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._number = 0
        self._op = ""
        self._stack = (folder / f"rank{rank}.stack").open("w")
        # Also answers a signal: faulthandler needs neither the interpreter's lock nor a thread.
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)
        self._ended = threading.Event()
        self.note("started", 0)
        self._thread = threading.Thread(target=self._answer, daemon=True, name="beacon")
        self._thread.start()

    def begin(self, op: str) -> None:
        """An operation begins; an empty name: none is under way."""
        self._op = op
        self.note("begin" if op else "idle", -1)

    def note(self, phase: str, step: int) -> None:
        self._number += 1
        body = {**self._place, "op": self._op, "phase": phase, "step": step}
        self._put(f"rank{self._rank}.json", {**body, "number": self._number, "at_s": time.time()})

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        self._stack.close()

    def _answer(self) -> None:
        answered = _request(self._folder)  # of a start before this one
        while not self._ended.wait(POLL_S):
            asked = _request(self._folder)
            if asked and asked != answered:
                answered = asked
                faulthandler.dump_traceback(file=self._stack, all_threads=True)
                self._stack.flush()
                self._put(f"rank{self._rank}.trace", {"answers": asked, "trace": _trace()})

    def _put(self, name: str, body: dict[str, Any]) -> None:
        building = self._folder / f".{name}.building"
        building.write_text(json.dumps(body))
        building.rename(self._folder / name)


def _request(folder: Path) -> str:
    path = folder / REQUEST_FILE
    return path.read_text() if path.exists() else ""


def _trace() -> dict[str, Any]:
    """Collectives of this process that have not ended, by the flight recorder; the number of the
    last one that it entered in each group; who is in each of its groups; and whom it waits for
    outside of them."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    call, needed = waits.now()
    found: dict[str, Any] = {"entries": [], "last": {}, "groups": {}}
    found["waits"] = {"call": call, "ranks": needed}
    if not dist.is_initialized():
        return found
    world = dist.distributed_c10d._world
    for group, group_name in world.pg_names.items():  # those that this rank is in
        found["groups"][group_name] = sorted(world.pg_group_ranks[group])
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        for entry in json.loads(dump()).get("entries", []) if dump else []:
            if not entry["is_p2p"]:
                found["last"][entry["process_group"][0]] = entry["collective_seq_id"]
            if not entry["retired"]:
                found["entries"].append(entry)
    return found
