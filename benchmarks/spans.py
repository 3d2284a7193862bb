"""What a span costs: while no profile is taken, and while one is. `python -m benchmarks.spans`."""

import json
import sys
import timeit

from shared.spans import MAX_SPANS, recorder, span

NUM = MAX_SPANS


def measure() -> dict[str, float]:
    """Microseconds of one `with span(…)` with a fact, the best of five rounds."""
    off = _round_us()
    rounds = []
    for _ in range(5):
        recorder().start(NUM)
        rounds.append(_round_us(repeat=1))
        recorder().stop()
        recorder().drain()
    return {"off_us": off, "on_us": min(rounds)}


def _round_us(repeat: int = 5) -> float:
    def work() -> None:
        with span("group", "groups", group="job.g000017"):
            pass

    return min(timeit.repeat(work, number=NUM, repeat=repeat)) / NUM * 1e6


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps({name: round(value, 3) for name, value in measure().items()}) + "\n"
    )
