"""Where a server is: on this host or another one, and which address of ours it can reach."""

import ipaddress
import socket
from urllib.parse import urlsplit


def is_here(url: str) -> bool:
    """Whether the server is on this host, so that it sees our files and our memory. A container
    with an address of its own counts as another host. OSError when its name is unknown."""
    ours, theirs = _ends(url)
    return ours == theirs or ipaddress.ip_address(theirs).is_loopback


def own_address(url: str) -> str:
    """Ours on the way to the server."""
    ours, _ = _ends(url)
    return ours


def _ends(url: str) -> tuple[str, str]:
    """Of a connection that is not made: no packet is sent."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as end:
        end.connect(address)
        return str(end.getsockname()[0]), str(end.getpeername()[0])
