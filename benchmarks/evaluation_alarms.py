"""How often two evaluations of one version are called different, by test and by kind of problems.

`python -m benchmarks.evaluation_alarms`: simulated problems, eight samples each; for the sign-flip
test at the level that reports and pages use, and for three tests at a level of 5 %.
"""

import argparse
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from services.evaluator.statistics import Array, clustered_intervals
from shared.statistics import LEVEL, mean_interval, sign_flip_p

N = 8  # samples of a problem
KINDS: dict[str, Callable[[np.random.Generator], Array]] = {
    "half never solved": lambda rng: np.r_[np.zeros(15), rng.beta(0.8, 0.8, 15)],
    "all or nothing": lambda rng: rng.beta(0.15, 0.15, 30),
    "even": lambda rng: rng.beta(2, 3, 30),
}
"""Chances of being solved, one a problem."""
LARGE: dict[str, Callable[[np.random.Generator], Array]] = {
    "500 hard ones": lambda rng: rng.beta(0.3, 1.2, 500)
}


def main() -> None:
    """Print the share of false alarms of each test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    tests = (f"sign-flip {LEVEL:.1%}", "sign-flip 5 %", "Student 5 %", "bootstrap 5 %")
    table = Table("problems", *tests)
    for name, draw in (KINDS | LARGE).items():
        rng = np.random.default_rng(args.seed)
        drawn = [draw(rng) for _ in range(args.pairs)]
        alarms = _alarms([(rng.binomial(N, p) - rng.binomial(N, p)) / N for p in drawn])
        table.add_row(name, *(f"{share:.1%}" for share in alarms))
    Console().print(table)


def _alarms(differences: list[Array]) -> list[float]:
    p_values = np.array([sign_flip_p(one) for one in differences])
    student = [mean_interval(one).excludes_zero for one in differences]
    bootstrap = [one.excludes_zero for one in clustered_intervals(np.stack(differences, axis=1))]
    verdicts = (p_values <= LEVEL, p_values <= 0.05, student, bootstrap)
    return [float(np.mean(verdict)) for verdict in verdicts]


if __name__ == "__main__":
    main()
