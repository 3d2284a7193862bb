"""Settings of the reward service; which grader a job uses is in the job's document."""

from pydantic import Field

from services.reward.pool.settings import PoolConfig
from services.reward.remote import RemoteConfig
from shared.config import Part, ServiceConfig, settings_of


class LimitsConfig(Part):
    """What one request to /v1/grade may ask for."""

    max_items: int = Field(10_000, gt=0)
    """Checks in one request."""
    max_response_chars: int = Field(1_000_000, gt=0)
    """Length of one response."""
    max_gold_chars: int = Field(20_000, gt=0)
    """Length of one gold."""
    max_body_bytes: int = Field(64 * 2**20, gt=0)
    """Size of one request."""
    max_queued_checks: int = Field(100_000, gt=0)
    """Requests are refused while so many checks wait for a worker."""
    default_timeout_s: float = Field(5.0, gt=0)
    """Wall-clock limit of a check that names none."""
    max_timeout_s: float = Field(60.0, gt=0)
    """The longest limit that a check may name."""


class RewardConfig(ServiceConfig):
    """The reward service's process."""

    model_config = settings_of("reward")

    port: int = Field(8730, ge=0, le=65535)
    """TCP port to listen on."""
    groups_in_flight: int = Field(32, gt=0)
    """Groups of the job that are graded at the same time."""
    pool: PoolConfig = PoolConfig()
    """The grading processes."""
    remotes: dict[str, RemoteConfig] = Field(default_factory=dict)
    """Graders over HTTP by name; a job asks for `remote.<name>`."""
    limits: LimitsConfig = LimitsConfig()
    """What one request may ask for."""
