"""What every `python -m services.<name>` does before anything heavy is imported."""

from typing import TypeVar

from shared.config import ServiceConfig, load_config
from shared.process import free_port
from shared.telemetry import configure_logging

C = TypeVar("C", bound=ServiceConfig)


def start(service: str, settings: type[C]) -> C:
    """Settings checked, a port chosen where none was asked for, and the log set up."""
    config = load_config(settings)
    if config.port == 0:
        config = config.model_copy(update={"port": free_port(config.host)})
    configure_logging(service, level=config.log.level, json=config.log.as_json, replica=config.name)
    return config
