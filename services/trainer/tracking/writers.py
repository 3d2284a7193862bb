"""One small interface over the two libraries, which are optional and imported only when used."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shared.job_cluster import TrackingSection, WandbSection

Numbers = Mapping[str, float]


class Writer(Protocol):
    def write(self, step: int, numbers: Numbers, at_s: float) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def writers_of(
    tracking: TrackingSection, run_dir: Path, *, document: dict[str, Any]
) -> list[Writer]:
    """Those that the job asks for; `document` is the job, which W&B shows beside its curves."""
    found: list[Writer] = []
    if tracking.tensorboard:
        found.append(TensorBoard(run_dir / "tensorboard"))
    if tracking.wandb is not None:
        found.append(Wandb(tracking.wandb, run_dir, document=document))
    return found


class TensorBoard:
    """Event files as TensorBoard reads them; needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, numbers: Numbers, at_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=one) for tag, one in numbers.items()]
        self._writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A W&B run of the job's name; offline ones are sent later with `wandb sync`.

    Everything that the library keeps goes into the run folder.
    """

    def __init__(self, settings: WandbSection, run_dir: Path, *, document: dict[str, Any]) -> None:
        folder = run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / name.lower()))
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            id=run_dir.name,
            name=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            mode=settings.mode,
            config=document,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def write(self, step: int, numbers: Numbers, at_s: float) -> None:
        """Evaluations come after the step they belong to, which W&B's own step does not allow."""
        self._run.log({**numbers, "step": step, "_timestamp": at_s or time.time()})

    def flush(self) -> None:
        return None  # the library does so by itself

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()
