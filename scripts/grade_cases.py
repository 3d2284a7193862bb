"""Grade a file of cases and print a table: verdict, outcome, time, and what was expected.

`python -m scripts.grade_cases FILE [--grader math] [--out TABLE.md]`. FILE holds JSON lines with
`response`, `gold` and, if known, `expected` ("correct" or "incorrect"), `id`, `note`, and `grader`
where it is another one. Exit code 1 when a case with an expectation is judged otherwise.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from services.reward.pool.settings import PoolConfig
from shared.messages import Outcome, Score


def main() -> None:
    options = _options()
    cases = [json.loads(line) for line in options.file.read_text().split("\n") if line.strip()]
    results = asyncio.run(_grade(cases, options.grader, options.timeout_s))
    table = Table("id", "response", "gold", "outcome", "reason", "ms", "expected", "judged")
    num_wrong = 0
    for number, (case, (outcome, seconds)) in enumerate(zip(cases, results, strict=True)):
        judged = "correct" if isinstance(outcome, Score) and outcome.value > 0 else "incorrect"
        is_wrong = case.get("expected", judged) != judged
        num_wrong += is_wrong
        table.add_row(
            str(case.get("id", number)),
            *(_short(case["response"], 36), _short(str(case["gold"]), 16), outcome.kind),
            *(_short(_reason(outcome), 40), f"{seconds * 1e3:.1f}"),
            *(case.get("expected", ""), f"[red]{judged}[/]" if is_wrong else judged),
        )
    Console(width=160).print(table)
    if options.out:
        options.out.write_text(_markdown(cases, results))
    print(f"{len(cases)} cases, {num_wrong} judged otherwise than expected")
    raise SystemExit(1 if num_wrong else 0)


async def _grade(
    cases: list[dict[str, Any]], grader: str, timeout_s: float
) -> list[tuple[Outcome, float]]:
    """One after the other, so that each time is the case's own."""
    pool = await GradingPool.start(PoolConfig(workers=1))
    await pool.prepare()
    await pool.warmed_up()
    results = []
    for case in cases:
        begin_s = time.perf_counter()
        check = Check(case.get("grader", grader), case["response"], str(case["gold"]), timeout_s)
        (outcome,) = await pool.grade([check])
        results.append((outcome, time.perf_counter() - begin_s))
    await pool.close()
    return results


def _markdown(cases: list[dict[str, Any]], results: list[tuple[Outcome, float]]) -> str:
    """The same table for a document."""
    lines = ["| case | response | gold | verdict | outcome | ms |", "|---|---|---|---|---|---|"]
    for number, (case, (outcome, seconds)) in enumerate(zip(cases, results, strict=True)):
        is_right = isinstance(outcome, Score) and outcome.value > 0
        texts = [_short(str(case[key]), 60).replace("|", "\\|") for key in ("response", "gold")]
        told = f"{outcome.kind}: {_short(_reason(outcome), 60)}".replace("|", "\\|")
        lines.append(
            f"| {case.get('id', number)} | `` {texts[0]} `` | `` {texts[1]} `` "
            f"| {'right' if is_right else 'wrong'} | {told} | {seconds * 1e3:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _reason(outcome: Outcome) -> str:
    return str(getattr(outcome, "reason", ""))


def _short(text: str, width: int) -> str:
    text = " ".join(text.split()).replace("[", "\\[")
    return text if len(text) <= width else f"…{text[1 - width :]}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.grade_cases")
    parser.add_argument("file", type=Path)
    parser.add_argument("--grader", default="math")
    parser.add_argument("--out", type=Path, help="write the table as Markdown, too")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
