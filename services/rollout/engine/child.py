"""How every engine child begins: tied to its service, told what to start."""

from shared.channel import Request, SyncChannel
from shared.process import die_with_parent
from shared.telemetry import configure_logging


def begin(argv: list[str]) -> tuple[SyncChannel, Request]:
    """The channel that ADDRESS PARENT_PID name, and the service's request to start."""
    address, parent_pid = argv
    die_with_parent(int(parent_pid))
    configure_logging("rollout-engine")
    channel = SyncChannel.connect(address)
    first = channel.recv(60.0)
    if first is None or first.op != "start":
        raise SystemExit(f"the service was expected to start the engine, not {first}")
    return channel, first
