"""Grading: start, checks per second and core against a bare math-verify loop, latency under attack.

`python -m benchmarks.reward [--seconds 4] [--cases FILE] [--out FILE]`. Throughput counts the CPU
seconds of every process, the service's event loop included, so that other work on the machine does
not matter; the same cases go through all, gold first. Latency is open loop (normal checks arrive at
a fixed rate in bursts of eight, whatever is open) and that of normal checks. The same ones arrive
at the same times in both kinds of rounds; hostile ones come on top, so that they are a tenth of
all. Rounds with and without alternate, so that what else the machine does meets both; the ratio is
that of the medians over rounds.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from services.reward.pool.settings import PoolConfig
from shared.messages import Outcome, Score

BARE = "bare"  # math-verify behind our pool: what the pool itself costs
PLUG_INS = {BARE: "benchmarks.reward:grade_bare"}
REQUEST = 256
GROUP = 8
HOSTILE_SHARE = 0.1
HOSTILE_TIMEOUT_S = 2.0

STEPS = (
    "We set up the equation $x^2 - 5x + 6 = 0$, factor it as $(x-2)(x-3)$ and look at both roots. "
    "Substituting back gives $\\frac{a}{b}$ in lowest terms, and the other cases are symmetric. "
)

# (answer, gold): mostly integers, as in the public sets; right and wrong ones of each kind.
CASES = [
    *[(str(n), str(n if n % 2 else n + 1)) for n in range(11, 71, 3)],
    ("1,234", "1234"), ("-17", "17"), ("073", "73"), ("2.5", r"\frac{5}{2}"), ("3/4", "0.75"),
    (r"\frac{14}{3}", r"\frac{14}{3}"), (r"\dfrac{14}{3}", r"\frac{14}{3}"),
    (r"\frac{3}{56}", r"\frac{5}{56}"), (r"3\sqrt{13}", r"3\sqrt{13}"),
    (r"\sqrt{117}", r"3\sqrt{13}"), (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
    (r"2\sqrt{5}", r"5\sqrt{2}"), (r"\frac{\pi}{6}", r"-\frac{\pi}{6}"), (r"18+2\pi", r"2(9+\pi)"),
    (r"x^2+2x+1", r"(x+1)^2"), (r"5x-7y", r"5x+7y"), (r"2^{n+1}", r"2\cdot 2^n"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \frac{\pi}{2})"), ("(15,-29)", "(15,29)"),
    (r"[0,1)", r"[0,1]"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    ("1,-2", "-2,1"), (r"\{1,2,3\}", r"\{3,2,1\}"), (r"90^\circ", "90"), (r"15\text{ cm}", "15"),
    (r"\text{Evelyn}", r"\text{Evelyn}"), (r"\text{(B)}", "C"), ("x=5", "5"), (r"12\%", "12"),
    (r"6-5i", r"6+5i"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
]  # fmt: skip

# `N` is another number each time. The first three are refused at sight, the others run on and on.
HOSTILE = [
    r"9^{9^{N}}", r"N00000!", "{" * 3000 + "N" + "}" * 3000, r"\int \frac{N}{x^5+x+1}dx",
    r"\sum_{k=1}^{9999}\frac{1}{k^N}", "|A" * 40 + "+N", "x_" * 90 + "N",
    r"\prod_{k=1}^{9000}(1+\frac{x}{k+N})",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Throughput:
    what: str
    checks_per_core_s: float
    of_bare: float


@dataclass(frozen=True, slots=True)
class Start:
    """Wall clock from nothing until checks are taken, and until mathematics is loaded as well."""

    what: str
    median_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    what: str
    normal_per_s: float
    num_normal: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    unscored: int


def main() -> None:
    options = _options()
    cases = read_cases(options.cases)
    results: dict[str, Sequence[Throughput | Latency | Start]] = {}
    if options.only in (None, "start"):
        results["start"] = asyncio.run(_starts(options))
    if options.only in (None, "throughput"):
        results["throughput"] = _throughput(cases, options.seconds)
    if options.only in (None, "latency"):
        results["latency"] = asyncio.run(_latency(cases, options))
    for name, result in results.items():
        Console(width=100).print(_table(f"{name}, {len(cases)} cases", result))
    if options.out:
        rows = {name: [asdict(row) for row in result] for name, result in results.items()}
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


async def _starts(options: argparse.Namespace) -> list[Start]:
    took: dict[str, list[float]] = {"the pool takes checks": [], "mathematics is loaded": []}
    for _ in range(options.rounds):
        begin_s = time.perf_counter()
        pool = await GradingPool.start(_pool_config(options))
        took["the pool takes checks"].append(time.perf_counter() - begin_s)
        await pool.prepare()
        took["mathematics is loaded"].append(time.perf_counter() - begin_s)
        await pool.close()
    return [
        Start(what, round(median(seconds), 3), round(max(seconds), 3))
        for what, seconds in took.items()
    ]


def grade_bare(response: str, gold: str) -> Score:
    """math-verify as its authors show it, without time-outs of its own."""
    from math_verify import parse, verify

    left = parse(f"${gold}$", parsing_timeout=None)
    right = parse(response, parsing_timeout=None)
    return Score(value=float(verify(left, right, timeout_seconds=None)))


def _throughput(cases: Sequence[Check], seconds: float) -> list[Throughput]:
    from services.reward.graders.math import grade

    rates = {
        "bare math-verify loop": _loop_rate(grade_bare, cases, seconds),
        "bare math-verify in the pool": asyncio.run(_pool_rate(cases, seconds, BARE)),
        "our grader in a loop": _loop_rate(grade, cases, seconds),
        "our grader in the pool": asyncio.run(_pool_rate(cases, seconds, "math")),
    }
    bare = rates["bare math-verify loop"]
    return [Throughput(what, round(rate, 1), round(rate / bare, 2)) for what, rate in rates.items()]


def _loop_rate(
    grade: Callable[[str, str], object], cases: Sequence[Check], seconds: float
) -> float:
    for case in cases:  # the parser learns; both sides are measured warm
        grade(case.response, case.gold)
    begin_s, num = time.process_time(), 0
    while time.process_time() - begin_s < seconds:
        for case in cases:
            grade(case.response, case.gold)
        num += len(cases)
    return num / (time.process_time() - begin_s)


async def _pool_rate(cases: Sequence[Check], seconds: float, grader: str) -> float:
    pool = await GradingPool.start(
        PoolConfig(workers=1, plug_ins=PLUG_INS, slow_after_s=30, max_checks_per_worker=10**9)
    )
    await pool.prepare()
    await pool.warmed_up()
    checks = [Check(grader, case.response, case.gold, 30.0) for case in cases]
    source = cycle(checks)
    await pool.grade(checks)
    (pid,) = pool.pids
    begin_s, num = _cpu_s(pid), 0
    while _cpu_s(pid) - begin_s < seconds:
        await pool.grade(list(islice(source, REQUEST)))
        num += REQUEST
    assert pool.pids == [pid], "the worker was replaced, and its CPU time is lost"
    rate = num / (_cpu_s(pid) - begin_s)
    await pool.close()
    return rate


def _cpu_s(worker_pid: int) -> float:
    """CPU time of this process and of its one worker."""
    fields = Path(f"/proc/{worker_pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_latency(
    pool: GradingPool, cases: Sequence[Check], *, rate: float, seconds: float, rounds: int
) -> list[Latency]:
    """Of normal checks alone, of the same with hostile ones on top, and the ratio of the two."""
    await pool.prepare()
    await pool.warmed_up()
    await pool.grade(cases)
    found: dict[str, list[Latency]] = {}
    for number in range(rounds):
        for what, share in (("normal checks alone", 0.0), ("with 10 % hostile", HOSTILE_SHARE)):
            one = await _open_loop(pool, cases, what, share, rate, seconds, seed=number)
            found.setdefault(what, []).append(one)
    alone, mixed = (_median(ones) for ones in found.values())
    return [alone, mixed, _ratio(alone, mixed)]


async def _latency(cases: Sequence[Check], options: argparse.Namespace) -> list[Latency]:
    pool = await GradingPool.start(_pool_config(options))
    found = await measure_latency(
        pool, cases, rate=options.rate, seconds=options.seconds, rounds=options.rounds
    )
    await pool.close()
    return found


def _median(rounds: Sequence[Latency]) -> Latency:
    """Of each figure over the rounds."""
    figures = {
        name: round(median(getattr(one, name) for one in rounds), 2)
        for name in ("p50_ms", "p99_ms", "max_ms")
    }
    unscored = sum(one.unscored for one in rounds)
    return replace(rounds[0], **figures, unscored=unscored)


def _ratio(alone: Latency, mixed: Latency) -> Latency:
    figures = {
        name: round(getattr(mixed, name) / getattr(alone, name), 2)
        for name in ("p50_ms", "p99_ms", "max_ms")
    }
    return replace(mixed, what="ratio", **figures, unscored=0)


def _pool_config(options: argparse.Namespace) -> PoolConfig:
    return PoolConfig(
        workers=options.workers,
        slow_nice=options.slow_nice,
        slow_workers=options.slow_workers,
        spare_workers=options.spare_workers,
    )


async def _open_loop(
    pool: GradingPool,
    cases: Sequence[Check],
    what: str,
    share: float,
    rate: float,
    seconds: float,
    *,
    seed: int,
) -> Latency:
    """Latency of a normal check: from its arrival to its own outcome; ends with the last one."""
    rng = random.Random(seed)
    source = cycle(rng.sample(cases, len(cases)))
    asked: list[asyncio.Task[tuple[float, Outcome] | None]] = []
    begin_s = time.perf_counter()
    for number in range(int(rate * seconds / GROUP)):
        due_s = begin_s + number * GROUP / rate
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        for _ in range(GROUP):
            if rng.random() < share / (1 - share):
                asked.append(asyncio.create_task(_timed(pool, _hostile(rng), is_hostile=True)))
            asked.append(asyncio.create_task(_timed(pool, next(source), is_hostile=False)))
    normal = [result for result in await asyncio.gather(*asked) if result is not None]
    ms = sorted(seconds * 1e3 for seconds, _ in normal)
    p50_ms, p99_ms, max_ms = (round(x, 2) for x in (median(ms), quantiles(ms, n=100)[98], ms[-1]))
    unscored = sum(outcome.kind != "score" for _, outcome in normal)
    return Latency(what, rate, len(ms), p50_ms, p99_ms, max_ms, unscored)


async def _timed(
    pool: GradingPool, check: Check, *, is_hostile: bool
) -> tuple[float, Outcome] | None:
    begin_s = time.perf_counter()
    (outcome,) = await pool.grade([check])
    return None if is_hostile else (time.perf_counter() - begin_s, outcome)


def _hostile(rng: random.Random) -> Check:
    answer = rng.choice(HOSTILE).replace("N", str(rng.randrange(2, 900)))
    return Check("math", f"{STEPS}\\boxed{{{answer}}}", r"\frac{17}{3}", HOSTILE_TIMEOUT_S)


def read_cases(path: Path | None = None) -> list[Check]:
    """Normal checks of a file, or the ones above."""
    pairs: Iterable[tuple[str, str]] = (
        ((f"{STEPS * 4}So the answer is $\\boxed{{{answer}}}$.", gold) for answer, gold in CASES)
        if path is None
        else _cases_of_file(path)
    )
    return [Check("math", response, gold) for response, gold in pairs]


def _cases_of_file(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row["response"], str(row["gold"])


def _table(title: str, rows: Sequence[Throughput | Latency | Start]) -> Table:
    table = Table(title=title, title_justify="left")
    fields = list(asdict(rows[0]))
    for name in fields:
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--workers", type=int, default=PoolConfig().workers)
    parser.add_argument("--rounds", type=int, default=5, help="of latency, each with and without")
    parser.add_argument("--slow-nice", type=int, default=PoolConfig().slow_nice)
    parser.add_argument("--spare-workers", type=int, default=PoolConfig().spare_workers)
    parser.add_argument("--slow-workers", type=int, default=PoolConfig().slow_workers)
    parser.add_argument("--only", choices=["start", "throughput", "latency"])
    parser.add_argument(
        "--rate", type=float, default=80.0, help="normal checks per second that arrive"
    )
    parser.add_argument("--cases", type=Path, help="JSON lines with response and gold")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
