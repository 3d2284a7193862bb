"""`eval`: how good is a checkpoint, or the version that a server serves now?

Without `--evaluator` all that a bare checkpoint needs is started here and stopped afterwards.
The same command again goes on where an interrupted one was, and shows what a finished one found.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli.eval_request import Defaults, defaults_of, merged
from services.cli.run import log_to, run
from services.cli.stack import choose_ports, offline_programs
from shared.broker import HOST
from shared.data.suites import SUITES
from shared.errors import ConfigInvalid, DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.job import expand_path
from shared.local_stack import running
from shared.refusals import sentences
from shared.statistics import shown_ks

_POLL_S = 0.3
_MISREAD = 0.99  # so many samples without an answer: the grader is wrong, or the policy is none

Number = Annotated[int | None, typer.Option(min=1)]


def evaluate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A release directory or runs/<job>/weights/v<version>."),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(help=f"Its name; {', '.join(SUITES)} and those of the run have defaults."),
    ] = "suite",
    data: Annotated[
        Path | None, typer.Option(help="JSON lines or parquet; default: the run's, if it has any.")
    ] = None,
    samples: Annotated[int | None, typer.Option("-k", "--samples", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=1e-6, help="Default: 1.")] = None,
    top_p: Annotated[float | None, typer.Option(min=1e-6, max=1, help="Default: 1.")] = None,
    max_response_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Default: 4,096, and half of the model's context at most."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Response budgets to report, such as 4096,8192,16384.")
    ] = "",
    data_format: Annotated[str | None, typer.Option("--format", help="Of the rows.")] = None,
    prompt_format: Annotated[
        str | None, typer.Option(help="raw, thinking or non_thinking; default: raw.")
    ] = None,
    template: Annotated[str | None, typer.Option(help="Holds {problem}.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a chat format.")] = None,
    grader: Annotated[
        str | None, typer.Option(help="Default: the suite's, else the run's, else math.")
    ] = None,
    max_problems: Number = None,
    context_length: Number = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    replica: Annotated[str | None, typer.Option(help="A server of the running job.")] = None,
    evaluator: Annotated[str | None, typer.Option(envvar="TANDEM_EVALUATOR", metavar="URL")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("runs"),
    deadline_s: Annotated[float, typer.Option(min=1)] = 24 * 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Evaluate a checkpoint (or, at a running evaluator, the version that a server serves)."""
    given_budgets = _budgets(budgets)
    defaults = _defaults(suite, checkpoint, context_length)
    body = merged(
        defaults.body,
        _without_none(
            {
                "suite": suite,
                "data": _without_none(
                    {
                        "path": str(data.absolute()) if data else None,
                        "format": data_format,
                        "prompt_template": template,
                        "prompt_format": prompt_format,
                        "system": system,
                    }
                ),
                "samples_per_problem": samples,
                "temperature": temperature,
                "top_p": top_p,
                "max_response_tokens": max_response_tokens or max(given_budgets, default=None),
                "budgets": given_budgets,
                "grader": grader,
                "max_problems": max_problems,
                "context_length": context_length,
                "seed": seed,
                "replica": replica,
                "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
                "deadline_s": deadline_s,
            }
        ),
    )
    if not {"path", "dataset"} & _without_none(body["data"]).keys():
        raise typer.BadParameter("name the suite's file", param_hint="--data")
    typer.echo(
        f"asked {defaults.source} where the command does not say: grader {body['grader']}, "
        f"at most {body['max_response_tokens']} response tokens",
        err=True,
    )

    async def command() -> int:
        if evaluator is not None:
            result = await _ask(evaluator.rstrip("/"), body)
        elif checkpoint is None:
            raise ConfigInvalid("Name a checkpoint, or an evaluator that knows servers.")
        else:
            result = await _here(body, runs_dir, checkpoint)
        _show(result, as_json=as_json)
        _warn(result)
        return 0

    run(command(), drains=evaluator is None)


def _defaults(suite: str, checkpoint: Path | None, context_length: int | None) -> Defaults:
    try:
        return defaults_of(suite, checkpoint, context_length)
    except ConfigInvalid as err:
        raise typer.BadParameter(str(err)) from err


async def _here(body: dict[str, Any], runs_dir: Path, checkpoint: Path) -> dict[str, Any]:
    """Start what it takes, ask, stop it."""
    path = body["data"].get("path")
    named = [checkpoint, *([expand_path(path)] if path else [])]
    ports = choose_ports(num_rollout=0, num_reward=1, base=0)
    stack_dir = runs_dir / "_stack" / "eval"
    roots = [path.resolve() if path.is_dir() else path.resolve().parent for path in named]
    with log_to(stack_dir / "stack.log"):
        programs = offline_programs(ports, data_dir=stack_dir, runs_dir=runs_dir, data_roots=roots)
        async with running(programs, log_dir=stack_dir):
            return await _ask(f"http://{HOST}:{ports.evaluator}", body)


async def _ask(evaluator: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post the request and wait for its end, telling how far it is."""
    console = Console(stderr=True)
    ends_s = time.monotonic() + body["deadline_s"] + 60  # its own comes first and says why
    async with HttpClient() as http:
        try:
            status = await http.post(f"{evaluator}/v1/evals", body)
        except HttpFailed as err:
            raise TandemError(_refusal(err)) from err
        url = f"{evaluator}/v1/evals/{status['eval_id']}"
        with console.status("") as shown:
            while status["state"] in ("queued", "running"):
                if time.monotonic() > ends_s:
                    raise DeadlineExceeded(f"{status['eval_id']} to end", body["deadline_s"])
                shown.update(f"{status['problems_done']} of {status['problems']} problems")
                await asyncio.sleep(_POLL_S)
                status = await http.get(url)
    if status["state"] == "failed":
        raise TandemError(status["error"])
    result: dict[str, Any] = status["result"]
    return result


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = Console()
    asked = result["asked"]
    table = Table(title=f"{result['suite']}, version {result['policy_version']}")
    for name in ("", "value", "95 % over problems"):
        table.add_column(name)
    for k in map(str, shown_ks(result["samples_per_problem"])):
        value = result["pass_at_k"][k]
        table.add_row(f"pass@{k}", f"{value:.4f}", _interval(result["pass_at_k_ci"][k]))
    table.add_row("  pass@1, sampling alone", "", _interval(result["pass_at_1_sampling_ci"]))
    table.add_row("truncated", f"{result['truncated_share']:.2%}", "")
    table.add_row("unparseable", f"{result['unparseable_share']:.2%}", "")
    table.add_row("timed out", f"{result['timeout_share']:.2%}", "")
    table.add_row("response tokens, mean", f"{result['response_tokens_mean']:.1f}", "")
    console.print(table)
    if result["budgets"]:
        console.print(_budget_table(result["budgets"]))
    console.print(
        f"grader {asked['grader']}, at most {asked['max_response_tokens']} tokens; "
        f"{result['num_problems']} problems x {result['samples_per_problem']} samples, "
        f"{result['skipped_problems']} skipped, {result['seconds']:.1f} s; {result['eval_id']}",
        soft_wrap=True,
    )


def _warn(result: dict[str, Any]) -> None:
    """A suite that nobody could read measures the question, not the policy."""
    if result["unparseable_share"] < _MISREAD:
        return
    asked = result["asked"]
    cut = f", {result['truncated_share']:.0%} were cut at {asked['max_response_tokens']} tokens"
    typer.echo(
        f"warning: grader {asked['grader']} found no answer in {result['unparseable_share']:.0%} "
        f"of the samples{cut if result['truncated_share'] else ''}: this says nothing of the "
        "policy if another --grader, --template or --max-response-tokens is meant.",
        err=True,
    )


def _budget_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("budget", "pass@1", "95 %", "truncated", "pass@1 of the untruncated", "95 %")
    for row in rows:
        untruncated = row["pass_at_1_untruncated"]
        table.add_row(
            f"{row['budget']:,}",
            f"{row['pass_at_1']:.4f}",
            _interval(row["pass_at_1_ci"]),
            f"{row['truncated_share']:.2%}",
            "none" if untruncated is None else f"{untruncated:.4f} ({row['num_untruncated']})",
            _interval(row["pass_at_1_untruncated_ci"]),
        )
    return table


def _interval(bounds: list[float] | None) -> str:
    return "unknown" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"


def _budgets(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as err:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint="--budgets") from err
    if any(budget < 1 for budget in found):
        raise typer.BadParameter("a budget is at least 1 token", param_hint="--budgets")
    return found


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _refusal(err: HttpFailed) -> str:
    """What the evaluator says is wrong; or that nobody answers."""
    if err.status is None:
        return f"No evaluator answers {err.url}: start one, or leave --evaluator out."
    return "; ".join(sentences(err.body))
