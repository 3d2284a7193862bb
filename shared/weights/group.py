"""A version's shards through a process group: NCCL between GPUs, gloo on a CPU.

    owners (ranks 0..P-1) ──broadcast, shard by shard──> servers (the ranks after them)

The group is this update's own: a store at the trainer, every wait under one deadline, no default
group touched. Members note in the store how far they are, so that one that hangs is named. What
arrives is checked like any other shard.
"""

import ipaddress
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import ConfigInvalid, DeadlineExceeded, WeightsCorrupt
from shared.weights.manifest import Manifest, ShardEntry
from shared.weights.protocol import GroupTransfer

_c10d: Any = dist  # its stores and groups are not typed

REQUIRED_BETWEEN_HOSTS = ("NCCL_SOCKET_IFNAME",)
_POLL_S = 0.01
_GRACE_S = 2.0  # in which members say that they failed, too


def send_shards(
    transfer: GroupTransfer, manifest: Manifest, read: Callable[[ShardEntry], Tensor]
) -> None:
    """Broadcast the shards whose `part` is our rank; `read` gives their bytes (uint8).

    Returns when every server has verified every shard. DeadlineExceeded names the members that are
    missing or hang; ConfigInvalid the settings that are.
    """
    group = _Group(transfer)
    for shard in manifest.shards:
        mine = shard.part == transfer.rank
        data = read(shard) if mine else torch.empty(shard.num_bytes, dtype=torch.uint8)
        group.broadcast(shard, data.to(group.device))
    group.wait_for_all("done", manifest)


def receive_shards(
    transfer: GroupTransfer, manifest: Manifest, write: Callable[[ShardEntry, Tensor], None]
) -> None:
    """Take every shard; `write` stores its bytes (uint8) and raises WeightsCorrupt if wrong."""
    group = _Group(transfer)
    for shard in manifest.shards:
        data = torch.empty(shard.num_bytes, dtype=torch.uint8, device=group.device)
        group.broadcast(shard, data)
        write(shard, data.cpu())
    group.note("done")


class _Group:
    def __init__(self, transfer: GroupTransfer) -> None:
        check_settings(transfer)
        self._transfer = transfer
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + transfer.deadline_s
        self.device = torch.device("cuda" if transfer.backend == "nccl" else "cpu")
        self._store = self._meet()
        self.note("joined")
        self._wait(range(transfer.size), "joined", "to join")
        self._group = self._make()

    def broadcast(self, shard: ShardEntry, data: Tensor) -> None:
        """All members' `data` becomes the owner's."""
        options = _c10d.BroadcastOptions()
        options.rootRank = shard.part
        try:
            self._group.broadcast([data], options).wait(self._left())
        except RuntimeError as err:
            self.note(f"failed/{shard.index}")
            raise self._named(shard, err) from err
        self.note(f"got/{shard.index}")

    def note(self, what: str) -> None:
        self._store.set(f"{what}/{self._transfer.rank}", "1")

    def wait_for_all(self, what: str, manifest: Manifest) -> None:
        owners = {shard.part for shard in manifest.shards}
        servers = [rank for rank in range(self._transfer.size) if rank not in owners]
        self._wait(servers, what, "to verify every shard")

    def _meet(self) -> Any:
        transfer = self._transfer
        try:
            store = _c10d.TCPStore(
                transfer.host,
                transfer.port,
                is_master=transfer.rank == 0,
                timeout=self._left(),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as err:
            where = f"the store at {transfer.host}:{transfer.port}"
            raise DeadlineExceeded(f"{where} ({err})", transfer.deadline_s) from err
        return _c10d.PrefixStore(f"update-{transfer.name}", store)

    def _make(self) -> Any:
        transfer = self._transfer
        arguments = (self._store, transfer.rank, transfer.size)
        try:
            if transfer.backend == "nccl":
                options = _c10d.ProcessGroupNCCL.Options()
                options._timeout = self._left()
                return _c10d.ProcessGroupNCCL(*arguments, options)
            return _c10d.ProcessGroupGloo(*arguments, self._left())
        except RuntimeError as err:
            raise DeadlineExceeded(f"all members to connect ({err})", transfer.deadline_s) from err

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.05, self._ends_s - time.monotonic()))

    def _wait(self, ranks: Sequence[int], what: str, words: str) -> None:
        while missing := [rank for rank in ranks if not self._has(f"{what}/{rank}")]:
            if time.monotonic() > self._ends_s:
                names = ", ".join(self._transfer.members[rank] for rank in missing)
                raise DeadlineExceeded(f"{names} {words}", self._transfer.deadline_s)
            time.sleep(_POLL_S)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _named(self, shard: ShardEntry, err: RuntimeError) -> DeadlineExceeded:
        """Who neither has the shard nor says that it failed, hangs or is gone."""
        until_s, silent = time.monotonic() + _GRACE_S, list(self._transfer.members)
        keys = (f"got/{shard.index}", f"failed/{shard.index}")
        while silent and time.monotonic() < until_s:
            with suppress(RuntimeError):  # the store is gone with its owner
                silent = [
                    name
                    for rank, name in enumerate(self._transfer.members)
                    if not any(self._has(f"{key}/{rank}") for key in keys)
                ]
            time.sleep(_POLL_S)
        who = ", ".join(silent) or "a member whose connection broke"
        what = f"{who} to take shard {shard.index} ({_last_line(err)})"
        return DeadlineExceeded(what, round(time.monotonic() - self._began_s, 1))


def check_settings(transfer: GroupTransfer) -> None:
    """ConfigInvalid unless this process can take part."""
    if transfer.backend != "nccl":
        return
    if not torch.cuda.is_available():
        raise ConfigInvalid("update.transport = nccl needs a GPU at every member; here is none")
    missing = [name for name in REQUIRED_BETWEEN_HOSTS if not os.environ.get(name)]
    if missing and not _is_loopback(transfer.host):
        raise ConfigInvalid(
            f"update.transport = nccl between hosts needs {', '.join(missing)} (actor.env); unset, "
            "NCCL picks an interface by itself and hangs on the wrong one"
        )


def _last_line(err: RuntimeError) -> str:
    """NCCL says at the end of many lines what it is."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(err).__name__


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bytes(shard: ShardEntry, checksum: str) -> None:
    if checksum != shard.checksum:
        raise WeightsCorrupt(f"shard {shard.index} from the process group: checksum differs")
