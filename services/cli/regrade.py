"""`regrade`: what would another grader have said of a recorded run?

Reads the samples of a run's evaluations (`evals/*.jsonl`) and, where the job recorded them, its
training groups (`recording.sqlite`); asks a reward service for new outcomes, and shows where they
differ. Each is judged as it was then: a group's weighted parts and its penalty for length are those
of the run's job. Another grader takes the place of the first one only. Nothing of the run changes.
"""

import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.run import log_to, run
from services.cli.stack import choose_ports, offline_programs
from services.evaluator.samples import read_samples
from services.trainer.recording import RECORDING_FILE
from shared.broker import HOST
from shared.chat import graded_text
from shared.errors import ConfigInvalid, HttpFailed, TandemError
from shared.http import HttpClient
from shared.job import JOB_FILE, Job
from shared.job_reward import OverlongSection, RewardPart, RewardSection
from shared.local_stack import running
from shared.messages import Outcome, Score, ScoredGroup
from shared.refusals import fault

# Of one request; a reward service takes 64 MiB.
ITEMS_AT_ONCE, BYTES_AT_ONCE = 1000, 32 * 2**20
REQUEST_S = 600.0
# Of files that do not say how they were graded.
UNKNOWN_GRADER, UNKNOWN_TIMEOUT_S = "math", 5.0
SAME = 1e-9  # values closer than this are the same
_OUTCOMES: TypeAdapter[list[Outcome]] = TypeAdapter(list[Outcome])


@dataclass(frozen=True, slots=True)
class Recorded:
    """One response of a run, and what was said of it then. Example name: 'v00000010 row 3.0'."""

    name: str
    response: str
    gold: str
    before: Outcome
    judging: "Judging"


@dataclass(frozen=True, slots=True)
class Judging:
    """How it was judged, in the fields of POST /v1/grade."""

    grader: str
    timeout_s: float
    parts: tuple[RewardPart, ...] = ()
    overlong: OverlongSection | None = None
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    recorded: Recorded
    after: Outcome


def regrade(
    run_dir: Annotated[Path, typer.Argument(help="runs/<job>, or one file of samples.")],
    grader: Annotated[
        str | None, typer.Option(help="The other grader; default: that of each sample.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Differences that are shown.", min=0)] = 40,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.01, max=60, help="Default: as it was then.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(envvar="TANDEM_REWARD", metavar="URL", help="Default: one here.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every difference as JSON lines.")
    ] = None,
) -> None:
    """Grade a recorded run again, or with another grader, and show the differences."""

    stack_dir = run_dir.absolute().parent / "_stack" / "regrade"

    async def command() -> int:
        recorded = list(read_run(run_dir))
        if not recorded:
            raise ConfigInvalid(f"{run_dir} holds no samples of evaluations and no recording.")
        asked = [with_changes(one, grader=grader, timeout_s=timeout_s) for one in recorded]
        if reward is not None:
            after = await ask(reward.rstrip("/"), asked)
        else:
            after = await _here(stack_dir, asked)
        found = differences(recorded, after)
        if json_file is not None:
            json_file.write_text("".join(_line(one) for one in found), encoding="utf-8")
        _show(recorded, after, found, limit)
        return 0

    run(command())


def read_run(path: Path) -> Iterator[Recorded]:
    """Every graded response of a run folder, or of one file of samples."""
    if path.is_file():
        yield from _samples(path, UNKNOWN_TIMEOUT_S)
        return
    has_job = (path / JOB_FILE).is_file()
    timeout_s = _reward_of(path / JOB_FILE).timeout_s if has_job else UNKNOWN_TIMEOUT_S
    for file in sorted((path / "evals").glob("*.jsonl")):
        if not file.name.endswith(".partial.jsonl"):
            yield from _samples(file, timeout_s)
    if (path / RECORDING_FILE).is_file():
        yield from _groups(path / RECORDING_FILE, _reward_of(path / JOB_FILE))


def with_changes(one: Recorded, *, grader: str | None, timeout_s: float | None) -> Recorded:
    """To be judged by another grader, or within another limit; None leaves it as it was."""
    given = {"grader": grader, "timeout_s": timeout_s}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(one, judging=replace(one.judging, **changes))


def _reward_of(path: Path) -> RewardSection:
    try:
        return Job.model_validate_json(path.read_bytes()).reward
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{path} does not say how the run was graded: {fault(err)}.") from err


def differences(recorded: Sequence[Recorded], after: Sequence[Outcome]) -> list[Difference]:
    """Where kind or value is another one."""
    pairs = zip(recorded, after, strict=True)
    return [Difference(one, now) for one, now in pairs if _key(one.before) != _key(now)]


def _samples(file: Path, timeout_s: float) -> Iterator[Recorded]:
    try:
        header, results = read_samples(file)
    except ValueError as err:
        raise ConfigInvalid(str(err)) from err
    grader = str((header.asked or {}).get("grader", UNKNOWN_GRADER))
    judging = Judging(grader, header.grading_timeout_s or timeout_s)
    for result in results:
        for number, sample in enumerate(result.samples):
            name = f"{file.stem} row {result.row}.{number}"
            response = graded_text(result.prompt, sample.text)
            yield Recorded(name, response, result.gold, sample.outcome, judging)


def _groups(file: Path, reward: RewardSection) -> Iterator[Recorded]:
    db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
    try:
        for (body,) in db.execute("SELECT body FROM groups ORDER BY draw"):
            scored = ScoredGroup.unpack(zlib.decompress(body))
            prompt = scored.group.prompt
            for rollout, outcome in zip(scored.group.rollouts, scored.outcomes, strict=True):
                response = graded_text(prompt.prompt_text, rollout.text)
                judging = Judging(
                    prompt.grader,
                    reward.timeout_s,
                    parts=tuple(reward.parts),
                    overlong=reward.overlong,
                    num_tokens=len(rollout.response_token_ids),
                )
                yield Recorded(rollout.rollout_id, response, prompt.gold, outcome, judging)
    except (sqlite3.Error, zlib.error) as err:
        raise ConfigInvalid(f"{file} cannot be read: {err}") from err
    finally:
        db.close()


async def _here(stack_dir: Path, recorded: Sequence[Recorded]) -> list[Outcome]:
    """With a reward service of our own."""
    ports = choose_ports(num_rollout=0, num_reward=1, base=0)
    with log_to(stack_dir / "stack.log"):
        programs = offline_programs(ports, data_dir=stack_dir, runs_dir=stack_dir, data_roots=[])
        async with running(programs, log_dir=stack_dir):
            url = f"http://{HOST}:{ports.reward[0]}"
            return await ask(url, recorded)


async def ask(url: str, recorded: Sequence[Recorded]) -> list[Outcome]:
    """What a reward service says now; a refusal is an error that names the key."""
    outcomes: list[Outcome] = []
    async with HttpClient() as http:
        for items in requests(recorded):
            try:
                answer = await http.post(f"{url}/v1/grade", {"items": items}, timeout_s=REQUEST_S)
            except HttpFailed as err:
                raise TandemError(_refusal(err)) from err
            outcomes += _OUTCOMES.validate_python(answer["outcomes"])
    return outcomes


def requests(recorded: Iterable[Recorded]) -> Iterator[list[dict[str, Any]]]:
    """The items of each request, in order; one that is too large by itself goes alone."""
    items: list[dict[str, Any]] = []
    num_bytes = 0
    for one in recorded:
        item = _item(one)
        size = len(json.dumps(item))  # at most so many bytes on the wire: there it is not escaped
        if items and (len(items) == ITEMS_AT_ONCE or num_bytes + size > BYTES_AT_ONCE):
            yield items
            items, num_bytes = [], 0
        items.append(item)
        num_bytes += size
    if items:
        yield items


def _item(one: Recorded) -> dict[str, Any]:
    judging = one.judging
    return {
        "response": one.response,
        "gold": one.gold,
        "grader": judging.grader,
        "timeout_s": judging.timeout_s,
        "parts": [part.model_dump() for part in judging.parts],
        "overlong": judging.overlong.model_dump() if judging.overlong else None,
        "num_tokens": judging.num_tokens,
    }


def _show(
    recorded: Sequence[Recorded],
    after: Sequence[Outcome],
    found: Sequence[Difference],
    limit: int,
) -> None:
    console = Console()
    moves = Counter((_word(one.recorded.before), _word(one.after)) for one in found)
    table = Table("before", "after", "responses")
    for (before, now), number in moves.most_common():
        table.add_row(before, now, str(number))
    console.print(
        f"{len(recorded)} responses, {len(found)} judged otherwise; mean of the scores "
        f"{_mean([one.before for one in recorded])} before, {_mean(after)} after"
    )
    if found:
        console.print(table)
    for one in found[:limit]:
        told = one.after
        reason = getattr(told, "extracted", "") or getattr(told, "reason", "")
        console.print(
            f"[bold]{escape(one.recorded.name)}[/]: {_word(one.recorded.before)} -> {_word(told)}, "
            f"gold {escape(one.recorded.gold[:60])!r}, read {escape(str(reason)[:80])!r}",
            soft_wrap=True,
        )
    if len(found) > limit:
        console.print(f"and {len(found) - limit} more (--limit, --json)")


def _line(one: Difference) -> str:
    fields: dict[str, Any] = {
        "name": one.recorded.name,
        "gold": one.recorded.gold,
        "response": one.recorded.response,
        "before": one.recorded.before.model_dump(),
        "after": one.after.model_dump(),
    }
    return json.dumps(fields) + "\n"


def _key(outcome: Outcome) -> tuple[str, float]:
    value = outcome.value if isinstance(outcome, Score) else 0.0
    return outcome.kind, round(value / SAME) * SAME


def _word(outcome: Outcome) -> str:
    return f"score {outcome.value:g}" if isinstance(outcome, Score) else outcome.kind


def _mean(outcomes: Sequence[Outcome]) -> str:
    values = [one.value for one in outcomes if isinstance(one, Score)]
    return f"{sum(values) / len(values):.4f} of {len(values)}" if values else "none"


def _refusal(err: HttpFailed) -> str:
    if err.status is None:
        return f"No reward service answers {err.url}: start one, or leave --reward out."
    try:
        return "; ".join(
            f"{one['key']}: {one['message']}" for one in json.loads(err.body)["detail"]
        )
    except (ValueError, KeyError, TypeError):
        return str(err)
