"""A request to an SGLang server from when it is asked until it is answered, over all its calls."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from services.rollout.engine.requests import GroupRequest
from services.rollout.engine.sglang.client import ServerRefused
from shared.errors import HttpFailed, Retryable

_CALLS_IN_VAIN = 3
_NOT_NOW = (None, 429, 502, 503, 504)  # said of the server, not of the request


@dataclass(slots=True)
class Asked:
    """What became of a request so far, and whether it is to end."""

    request: GroupRequest
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    in_vain: int = 0  # calls in a row that brought nothing, though the server is well
    _status: int | None = None  # of the last of them
    _why: str = ""

    def note_lost(self, err: HttpFailed) -> None:
        self._status, self._why = err.status, str(err)

    def note_cut(self, answer: dict[str, Any]) -> None:
        """A stream says in its last answer what else is an HTTP status."""
        reason = answer["meta_info"].get("finish_reason") or {}
        self._status, self._why = reason.get("status_code"), str(reason)

    def check_served(self) -> None:
        """Give up a request that the server, which is well, does not serve.

        `ServerRefused` when it fails at this very request, `Retryable` when it has no time for it.
        """
        if self.in_vain < _CALLS_IN_VAIN:
            return
        words = f"{self.in_vain} calls in a row for {self.request.request_id} brought nothing, "
        words += f"though SGLang is well: {self._why}"
        raise (Retryable if self._status in _NOT_NOW else ServerRefused)(words)
