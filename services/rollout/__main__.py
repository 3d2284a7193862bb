"""`python -m services.rollout`. Settings are checked before anything heavy is imported."""

from services.rollout.config import RolloutConfig
from shared.config import load_config
from shared.process import free_port
from shared.telemetry import configure_logging


def main() -> None:
    config = load_config(RolloutConfig)
    if config.port == 0:
        config = config.model_copy(update={"port": free_port(config.host)})
    configure_logging(
        "rollout", level=config.log.level, json=config.log.as_json, replica=config.name
    )
    from services.rollout.app import create_app, workers
    from shared.service import serve

    app = create_app(config)
    serve(
        app,
        host=config.host,
        port=config.port,
        workers=workers(app),
        drain_s=config.drain_s,
    )


if __name__ == "__main__":
    main()
