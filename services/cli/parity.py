"""`parity`: are these two the same policy? Two checkpoints, or the services of a running job.

Checkpoints are scored by a child process, because this one never loads torch; services are asked
by the evaluator. Either way the result is the same report.
"""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console

from services.cli.child import ask_child
from services.cli.run import run
from services.evaluator.parity.report import ParityReport, ParityStatus, Run, make_report
from services.evaluator.parity.terminal import print_report
from shared.errors import ConfigInvalid, DeadlineExceeded, HttpFailed, TandemError
from shared.http import HttpClient
from shared.models.deepseek_v4.architecture import Architecture
from shared.parity.offline_request import OfflineRequest, OfflineResult, Side
from shared.parity.scores import Bounds, ScoredSequence
from shared.refusals import fault, sentences
from shared.tokenizer import CheckpointTokenizer

LOCAL_EVALUATOR = "http://127.0.0.1:8740"
RANDOM_TOKENS, RANDOM_SEQUENCES = 300, 2
_POLL_S = 0.25

SideText = Annotated[
    str | None,
    typer.Argument(help="A release directory; DIR@served and DIR@release round activations."),
]
Files = Annotated[
    Path | None, typer.Option("--tokens", help="JSON: a list of lists of token ids to score.")
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text for the first side to complete.")
]
Bound = Annotated[float | None, typer.Option(min=0)]
Address = Annotated[str | None, typer.Option(metavar="URL")]


def parity(
    ours: SideText = None,
    theirs: SideText = None,
    tokens: Files = None,
    prompts: Prompts = None,
    num_samples: Annotated[int, typer.Option(help="Completions of a prompt.", min=1)] = 4,
    max_response_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=1e-6)] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    walk: Annotated[
        bool, typer.Option("--walk", help="Name the first layer and sub-module that departs.")
    ] = False,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Walk with each block on the first side's streams.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Of the walk, relative; by the trainer's dtype, or 1e-4.", min=0),
    ] = None,
    float64: Annotated[bool, typer.Option("--float64", help="Compute in float64.")] = False,
    max_mean: Bound = 0.04,
    max_p99: Bound = None,
    max_largest: Bound = None,
    max_k3: Bound = None,
    trainer: Address = None,
    rollout: Address = None,
    evaluator: Annotated[
        str, typer.Option(envvar="TANDEM_EVALUATOR", metavar="URL")
    ] = LOCAL_EVALUATOR,
    policy_version: Annotated[int | None, typer.Option(min=0)] = None,
    deadline_s: Annotated[float, typer.Option(min=1)] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report; - prints it instead.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page.")] = None,
) -> None:
    """Compare two checkpoints A B, or without them the sampler and the trainer of the running job.

    Exit code 0 only when the differences stay within the bounds.
    """
    bounds = Bounds(mean=max_mean, p99=max_p99, max=max_largest, k3=max_k3)

    async def command() -> int:
        _check_folders(json_file, html)
        sequences = _read_tokens(tokens) if tokens else None
        if (ours is None) != (theirs is None):
            raise ConfigInvalid("Name two checkpoints, or none to compare the running services.")
        common = {
            "prompts": prompts,
            "sequences": sequences,
            "num_samples": num_samples,
            "max_response_tokens": max_response_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        if ours is not None and theirs is not None:
            mode: Literal["none", "chained", "isolated"]
            mode = "isolated" if isolate else "chained" if walk else "none"
            dtype = "float64" if float64 else "float32"
            more: dict[str, Any] = {"walk": mode, "dtype": dtype}
            more |= {} if tolerance is None else {"tolerance": tolerance}
            request = _offline_request(ours, theirs, common | more)
            report = await _offline(request, bounds, deadline_s)
        else:
            body = common | {
                "trainer_url": trainer,
                "rollout_url": rollout,
                "policy_version": policy_version,
                "walk": walk or isolate,
                "tolerance": tolerance,
                "bounds": {"mean": max_mean, "p99": max_p99, "max": max_largest, "k3": max_k3},
                "deadline_s": deadline_s,
            }
            report = await _live(evaluator.rstrip("/"), body, deadline_s)
        _show(report, json_file, html)
        return 0 if report.passed else 1

    run(command())


async def _offline(request: OfflineRequest, bounds: Bounds, deadline_s: float) -> ParityReport:
    result = OfflineResult.model_validate_json(
        await ask_child(
            "shared.parity.offline",
            request,
            deadline_s=deadline_s,
            what="the two checkpoints to be scored",
        )
    )
    rows = zip(result.sequences, result.first, result.ours, result.theirs, strict=True)
    found = Run(
        ours=str(request.ours),
        theirs=str(request.theirs),
        sequences=[
            ScoredSequence(tuple(tokens), first, np.array(a), np.array(b))
            for tokens, first, a, b in rows
        ],
        sampled_by_ours=request.sequences is None,
        temperature=request.temperature,
        argmax_agreement=result.argmax_agreement,
        routing_agreement=result.routing_agreement,
        walk=result.walk,
        notes=result.notes,
        seconds=result.seconds,
    )
    return make_report(found, bounds, decode=_decoder(request.ours.path))


async def _live(evaluator: str, body: dict[str, Any], deadline_s: float) -> ParityReport:
    """Ask the evaluator and wait for its report."""
    end_s = time.monotonic() + deadline_s + 30  # its own deadline comes first and says why
    async with HttpClient() as http:
        try:
            answer = await http.post(f"{evaluator}/v1/parity", body)
        except HttpFailed as err:
            raise TandemError(_refusal(err)) from err
        status = ParityStatus.model_validate(answer)
        while status.state in ("queued", "running"):
            if time.monotonic() > end_s:
                raise DeadlineExceeded(f"{evaluator} to finish {status.parity_id}", deadline_s)
            await asyncio.sleep(_POLL_S)
            answer = await http.get(f"{evaluator}/v1/parity/{status.parity_id}")
            status = ParityStatus.model_validate(answer)
    if status.report is None:
        raise TandemError(status.error)
    return status.report


def _show(report: ParityReport, json_file: Path | None, html: Path | None) -> None:
    if html is not None:
        from services.evaluator.parity.page import render_page  # imports matplotlib: half a second

        html.write_text(render_page(report), encoding="utf-8")
    if json_file == Path("-"):
        typer.echo(report.model_dump_json())
        return
    if json_file is not None:
        json_file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    print_report(report, Console())


def _check_folders(json_file: Path | None, html: Path | None) -> None:
    """Before all the work: what it comes to has a place."""
    for path in (html, None if json_file == Path("-") else json_file):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise ConfigInvalid(f"{path}: expected a file to write in a folder that exists")


def _offline_request(ours: str, theirs: str, values: dict[str, Any]) -> OfflineRequest:
    try:
        sides = {"ours": Side.parse(ours), "theirs": Side.parse(theirs)}
        if values["prompts"] is None and values["sequences"] is None:
            values = values | {"sequences": _random_tokens(sides["ours"].path, values["seed"])}
        Architecture.load(sides["theirs"].path)  # what is missing is said before weights are read
        return OfflineRequest.model_validate(values | sides)
    except (ValueError, OSError) as err:
        raise ConfigInvalid(fault(err)) from err


def _random_tokens(release: Path, seed: int) -> list[list[int]]:
    arch = Architecture.load(release)
    draw = random.Random(seed)
    length = min(RANDOM_TOKENS, arch.max_position_embeddings)
    return [
        [draw.randrange(arch.vocab_size) for _ in range(length)] for _ in range(RANDOM_SEQUENCES)
    ]


def _read_tokens(path: Path) -> list[list[int]]:
    try:
        sequences = json.loads(path.read_text())
    except OSError as err:
        raise ConfigInvalid(fault(err)) from err
    except (ValueError, RecursionError) as err:
        raise ConfigInvalid(f"{path}: expected JSON, found none: {err}") from err
    if not isinstance(sequences, list) or not all(_is_tokens(tokens) for tokens in sequences):
        raise ConfigInvalid(f"{path}: expected a JSON list of lists of token ids")
    return sequences


def _is_tokens(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(type(token) is int for token in tokens)


def _decoder(release: Path) -> Any:
    """Text of tokens by the release's tokenizer; None where it has none."""
    try:
        return CheckpointTokenizer.load(release).decode
    except FileNotFoundError:
        return None


def _refusal(err: HttpFailed) -> str:
    """What the evaluator says is wrong; or that nobody answers."""
    if err.status is None:
        return f"No evaluator answers {err.url}: start one, or name another with --evaluator."
    return "; ".join(sentences(err.body))
