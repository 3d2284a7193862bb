"""`python -m services.trainer`: the conductor. Settings are checked before anything is imported."""

from services.trainer.config import TrainerConfig
from shared.start import start


def main() -> None:
    config = start("trainer", TrainerConfig)
    from services.trainer.app import create_app, workers
    from shared.service import serve

    app = create_app(config)
    running = workers(app, config)
    serve(app, host=config.host, port=config.port, workers=running, drain_s=config.drain_s)


if __name__ == "__main__":
    main()
