"""What happened to the servers between two looks at them, a line each.

A process is known by its address and number; a first look has no news.
"""

from collections.abc import Sequence

from shared.registry import Replica


class ServerNews:
    def __init__(self) -> None:
        self._known: dict[str, Replica] = {}  # all that were ever seen, as they were last
        self._here: set[str] | None = None

    def look(self, servers: Sequence[Replica]) -> list[str]:
        """Those who came, went, were started again or have a trouble that is new."""
        here = {server.name for server in servers}
        lines: list[str] = []
        if self._here is not None:
            lines += [f"{name} is gone" for name in sorted(self._here - here)]
            lines += [line for server in servers if (line := self._news_of(server))]
        self._known |= {server.name: server for server in servers}
        self._here = here
        return lines

    def _news_of(self, server: Replica) -> str:
        before = self._known.get(server.name)
        if before is None:
            return f"{server.name} joined"
        if (before.url, before.pid) != (server.url, server.pid):
            return f"{server.name} was started again"
        if server.name not in (self._here or ()):
            return f"{server.name} is back"
        if server.trouble and server.trouble != before.trouble:
            return f"{server.name}: {server.trouble}"
        return ""
