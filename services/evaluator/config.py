"""Settings of the evaluator service; what is evaluated is in the job's document or the request."""

from pathlib import Path

from pydantic import Field

from shared.config import Part, ServiceConfig, settings_of


class RunnerConfig(Part):
    """How an evaluation is carried out."""

    samples_in_flight: int = Field(128, gt=0)
    """Completions asked for at the same time; a job's rollout.max_running_requests may lower it."""
    request_s: float = Field(600.0, gt=0)
    """Longest wait for one completion, or for its grades."""
    retry_s: float = Field(0.5, gt=0)
    """Pause before a server that could not answer is asked again."""


class EvaluatorConfig(ServiceConfig):
    """The evaluator's process."""

    model_config = settings_of("evaluator")

    port: int = Field(8740, ge=0, le=65535)
    """TCP port to listen on."""
    runs_dir: Path = Path("runs")
    """Samples of an evaluation are written to `<runs_dir>/<job>/evals/`."""
    data_roots: tuple[Path, ...] = ()
    """Folders besides the working directory and `$DATA_ROOT` that a request may name files of."""
    runner: RunnerConfig = RunnerConfig()
    """How an evaluation is carried out."""
