"""Settings of a rollout server; engine and model are the job's."""

import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from shared.config import Part, ServiceConfig, settings_of


class LimitsConfig(Part):
    """What one request may ask for."""

    max_prompts: int = Field(4096, gt=0)
    """Prompts of one /v1/generate, or sequences of one /v1/score."""
    max_samples: int = Field(65536, gt=0)
    """Completions of one /v1/generate."""
    max_body_bytes: int = Field(2**28, gt=0)
    """Longest body of a request."""
    max_timeout_s: float = Field(3600.0, gt=0)
    """Longest deadline that a request may set."""


class SGLangConfig(Part):
    """The SGLang server of this machine, for jobs whose engine it is."""

    python: str | None = None
    """Interpreter that has SGLang; None is the one that runs this service."""
    platform: Literal["cpu", "cuda", "rocm"] = "cuda"
    """Which preset of flags and environment a server is started with."""
    url: str | None = None
    """A server that runs already, to attach to; None starts one."""
    token: SecretStr | None = None
    """Its admin key, if it asks for one."""
    transport: Literal["disk", "tensor", "gloo", "nccl"] = "disk"
    """How weights reach the server."""
    log_file: str | None = None
    """Where its output goes; None is a temporary file."""
    start_deadline_s: float = Field(1800.0, gt=0)
    """Longest time from its start to its first token."""
    extra_arguments: tuple[str, ...] = ()
    """More of its command line, word by word."""
    stream_interval: int = Field(0, ge=0)
    """Have completions streamed, an answer every so many tokens, so that those of a server that
    dies are kept. Each answer carries the whole sequence so far; 0 asks once, at its end."""


class RolloutConfig(ServiceConfig):
    """The rollout service's process."""

    model_config = settings_of("rollout")

    port: int = Field(8710, ge=0, le=65535)
    """TCP port to listen on."""
    shards_port: int = Field(0, ge=0, le=65535)
    """TCP port at which other servers pull the weights that are here; 0: any free one."""
    staging_dir: Path = Path(tempfile.gettempdir()) / "tandem-staging"
    """Weight shards are pulled into `<staging_dir>/<replica>/`; memory-backed is fastest. The
    active version stays there, and the one before it, which the next is written over."""
    max_update_bytes: int = Field(2**40, gt=0)
    """A version larger than this is refused."""
    group_deadline_s: float = Field(1800.0, gt=0)
    """Longest time one group may be sampled; then its prompt goes back to the others."""
    version_wait_s: float = Field(20.0, gt=0)
    """How long a taken prompt waits for the version it asks for, before it goes back."""
    engine_starts: int = Field(5, ge=1)
    """How often a job's engine that does not start is tried; then the job is told and pauses."""
    engine_retry_s: float = Field(5.0, gt=0)
    """Pause after the first failed start; each further one is twice as long."""
    watch_s: float = Field(0.2, gt=0)
    """How often the current version and the holds are looked at."""
    sglang: SGLangConfig = SGLangConfig()
    """Where and how an SGLang server runs here."""
    limits: LimitsConfig = LimitsConfig()
    """What one request may ask for."""
