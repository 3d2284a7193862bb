"""What a rollout server tells of itself over HTTP: its entry in the registry, and its load."""

from pydantic import Field

from shared.registry import Replica


class ServerInfo(Replica):
    """Example: rollout 'rollout-0' serves version 17, 12 completions in progress."""

    current_version: int | None = None
    """The trainer's newest version as it was announced; null: none yet."""
    held_version: int | None = None
    """The older version to serve instead while a rollback lasts; null: none."""
    unready: str | None = None
    """Why it should get no traffic; null if it may."""
    effective_checksum: str | None = None
    """xxh3-128 of the weights as they are served, hexadecimal; null before there are any."""
    engine_pid: int | None = None
    """Process id of the engine; null without one."""
    running: int = Field(0, ge=0)
    """Completions that are being decoded."""
    waiting: int = Field(0, ge=0)
    """Completions that wait for a slot."""
    tokens_sampled: int = Field(0, ge=0)
    """Tokens sampled since the engine was started."""
