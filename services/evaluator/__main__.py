"""`python -m services.evaluator`. Settings are checked before anything heavy is imported."""

from services.evaluator.config import EvaluatorConfig
from shared.start import start


def main() -> None:
    config = start("evaluator", EvaluatorConfig)
    from services.evaluator.app import create_app, workers
    from shared.service import serve

    app = create_app(config)
    running = workers(app, config)
    serve(app, host=config.host, port=config.port, workers=running, drain_s=config.drain_s)


if __name__ == "__main__":
    main()
