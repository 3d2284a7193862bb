"""`python -m services.rollout`. Settings are checked before anything heavy is imported."""

from services.rollout.config import RolloutConfig
from shared.start import start


def main() -> None:
    config = start("rollout", RolloutConfig)
    from services.rollout.app import create_app, workers
    from shared.service import serve

    app = create_app(config)
    running = workers(app)
    serve(app, host=config.host, port=config.port, workers=running, drain_s=config.drain_s)


if __name__ == "__main__":
    main()
