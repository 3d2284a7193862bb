"""`python -m services.reward`. Settings are checked before anything heavy is imported."""

from services.reward.config import RewardConfig
from shared.start import start


def main() -> None:
    config = start("reward", RewardConfig)
    from services.reward.app import create_app, workers
    from shared.service import serve

    app = create_app(config)
    running = workers(app, config)
    serve(app, host=config.host, port=config.port, workers=running, drain_s=config.drain_s)


if __name__ == "__main__":
    main()
