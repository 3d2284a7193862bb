"""How `eval` asks where the command does not say.

As the checkpoint's own run asks this suite; else as the suite's name says, with a response of half
the model's context at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.data.suites import SUITES
from shared.errors import ConfigInvalid
from shared.job import JOB_FILE, Job, expand_path
from shared.job_eval import SuiteSection
from shared.models.deepseek_v4.architecture import Architecture
from shared.refusals import fault

DEFAULT_RESPONSE_TOKENS = 4096
DEFAULT_GRADER = "math"
_OF_THE_RUN_ALONE = {"budgets", "every_steps", "deadline_s", "server", "also"}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request has before the command's own values; `source` says where it is from."""

    body: dict[str, Any]
    source: str


def defaults_of(suite: str, checkpoint: Path | None, context_length: int | None = None) -> Defaults:
    """`ConfigInvalid` names a run's job, or a release, that cannot be read."""
    job = _job_of(checkpoint)
    if job is not None and (asked := _suite_of(job, suite)) is not None:
        body = asked.model_dump(mode="json", exclude=_OF_THE_RUN_ALONE)
        return Defaults(body, f"as the checkpoint's run asks {suite}")
    body = _usual(suite, job)
    release = expand_path(job.model.rollout_checkpoint) if job else checkpoint
    room = context_length or (_context_of(release) if release else None)
    if room is not None:
        body["max_response_tokens"] = max(1, min(body["max_response_tokens"], room // 2))
    return Defaults(body, f"{suite}'s usual way" if suite in SUITES else "by defaults")


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, its data key by key; another file takes a data set's place."""
    data = dict(defaults.get("data", {})) | given.get("data", {})
    if "path" in given.get("data", {}):
        data.pop("dataset", None)
    return {**defaults, **given, "data": data}


def _usual(suite: str, job: Job | None) -> dict[str, Any]:
    """By the suite's name; a run's checkpoint is else graded and cut as in its training."""
    known = SUITES.get(suite)
    tokens = job.sampling.max_response_tokens if job and not known else DEFAULT_RESPONSE_TOKENS
    if known is None:
        grader = job.reward.grader if job else DEFAULT_GRADER
        return {"grader": grader, "max_response_tokens": tokens}
    return {
        "grader": known.grader,
        "max_response_tokens": tokens,
        "samples_per_problem": known.samples_per_problem,
        "data": {"format": known.format, "prompt_template": known.prompt_template},
    }


def _job_of(checkpoint: Path | None) -> Job | None:
    """Of the run that published `runs/<job>/weights/v<version>`; None for what no run made."""
    path = checkpoint and checkpoint.absolute().parent.parent / JOB_FILE
    if path is None or not path.is_file():
        return None
    try:
        return Job.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{path} is no job: {fault(err)}.") from err


def _suite_of(job: Job, suite: str) -> SuiteSection | None:
    return next((one for one in job.eval.suites if one.suite == suite), None) if job.eval else None


def _context_of(release: Path) -> int | None:
    """None for what is no release: the evaluator says what it is."""
    if not (release / "config.json").is_file():
        return None
    try:
        return Architecture.load(release).max_position_embeddings
    except (OSError, ValueError) as err:
        raise ConfigInvalid(f"{release} is no release: {fault(err)}.") from err
