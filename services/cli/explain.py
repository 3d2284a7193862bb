"""`explain`: a recorded sample scored again by the sampler that made it, version by version.

The sample comes from the run's folder, the weights from its version store; a child process has the
engine, because this one never loads torch.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from services.cli.child import ask_child
from services.cli.run import run
from services.trainer.recorded import RecordedSample, find_sample, version_folders
from shared.errors import ConfigInvalid
from shared.job import JOB_FILE, Job, expand_path
from shared.parity.rescore_request import RescoreRequest, RescoreResult
from shared.refusals import fault
from shared.tokenizer import CheckpointTokenizer

NOISE = 1e-6
"""What is sampled is computed again in the same order, so that bits are equal; another processor
may still round otherwise."""
SHOWN_TOKENS = 40


class Explanation(BaseModel):
    """`explain --json`. Of every response token: what was recorded, and what it scores now.

    `other_order` is how far the same sums come out elsewhere when they run in another order (one
    prefill): what two machines may differ by on this sample.
    """

    rollout_id: str
    step: int | None
    policy_versions: list[int]
    temperature: float
    reward: float | None
    token_ids: list[int]
    recorded: list[float]
    rescored: list[float]
    largest_difference: float
    noise_floor: float
    other_order: float

    @property
    def agrees(self) -> bool:
        return self.largest_difference <= self.noise_floor


def explain(
    rollout_id: Annotated[str, typer.Argument(help="As in events and samples: JOB.g000017.3.")],
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    deadline_s: Annotated[float, typer.Option(min=1)] = 300.0,
) -> None:
    """Score a recorded sample again under its own version and settings.

    Exit code 0 only when every log-probability comes out again within the noise floor.
    """

    async def command() -> int:
        run_dir = runs_dir / rollout_id.partition(".")[0]
        sample = await asyncio.to_thread(find_sample, run_dir, rollout_id)
        job = _job_of(run_dir)
        folders = await asyncio.to_thread(version_folders, run_dir, sample.versions)
        request = RescoreRequest(
            job=job,
            folders={version: path.resolve() for version, path in folders.items()},
            token_ids=sample.token_ids,
            spans=sample.spans,
            temperature=sample.temperature,
        )
        found = _explanation(sample, await _rescored(request, deadline_s))
        if as_json:
            typer.echo(found.model_dump_json())
        else:
            _show(found, job, Console())
        return 0 if found.agrees else 1

    run(command())


def _job_of(run_dir: Path) -> Job:
    path = run_dir / JOB_FILE
    try:
        job = Job.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{path} is no job of a run: {fault(err)}.") from err
    if job.rollout.engine != "embedded":
        raise ConfigInvalid(f"{run_dir} was sampled by {job.rollout.engine}: it is not run here")
    return job


async def _rescored(request: RescoreRequest, deadline_s: float) -> RescoreResult:
    answer = await ask_child(
        "services.rollout.rescore",
        request,
        deadline_s=deadline_s,
        what="the sample to be scored",
    )
    return RescoreResult.model_validate_json(answer)


def _explanation(sample: RecordedSample, scored: RescoreResult) -> Explanation:
    """Each token as the version scores it that sampled it."""
    return Explanation(
        rollout_id=sample.rollout_id,
        step=sample.step,
        policy_versions=sample.versions,
        temperature=sample.temperature,
        reward=sample.reward,
        token_ids=sample.token_ids[sample.num_prompt_tokens :],
        recorded=sample.logprobs,
        rescored=scored.logprobs,
        largest_difference=_largest(scored.logprobs, sample.logprobs),
        noise_floor=NOISE,
        other_order=_largest(scored.logprobs, scored.prefilled),
    )


def _largest(ours: list[float], theirs: list[float]) -> float:
    return float(np.abs(np.array(ours) - np.array(theirs)).max())


def _show(found: Explanation, job: Job, console: Console) -> None:
    versions = ", ".join(map(str, found.policy_versions))
    told: list[Any] = [
        f"{found.rollout_id}: {len(found.token_ids)} tokens of version {versions}, "
        f"{'recorded' if found.step is None else f'trained in step {found.step}'}, "
        f"reward {found.reward}, temperature {found.temperature:g}",
        _table(found, job),
        f"largest difference {found.largest_difference:.3g}, noise floor {found.noise_floor:g}: "
        + ("the same log-probabilities" if found.agrees else "NOT the same log-probabilities"),
        f"sums in another order move this sample by up to {found.other_order:.3g}",
    ]
    for part in told:
        console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))


def _table(found: Explanation, job: Job) -> Table:
    tokenizer = CheckpointTokenizer.load(expand_path(job.model.rollout_checkpoint))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("token", "recorded", "again", "difference"):
        table.add_column(column, justify="left" if column == "token" else "right")
    rows = zip(found.token_ids, found.recorded, found.rescored, strict=True)
    for token, recorded, again in list(rows)[:SHOWN_TOKENS]:
        text = repr(tokenizer.decode([token]))[1:-1]
        table.add_row(text, f"{recorded:.6f}", f"{again:.6f}", f"{again - recorded:.1e}")
    if len(found.token_ids) > SHOWN_TOKENS:
        table.add_row(f"and {len(found.token_ids) - SHOWN_TOKENS} more", "", "", "")
    return table
