"""What sampler, trainer and GPUs did when: of a run's events and nvidia-smi's rows.

A sampler is paused from an update's pause on; it samples while a group comes within half a second
(one takes 0.3 to 0.5 s); in what is left it evaluates, or has nothing that it may sample.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.report.events import RunEvents
from shared.messages import Event

GpuRows = Mapping[int, np.ndarray]  # of each GPU: seconds since the epoch, MiB used, % busy
BIN_S = 2.0
COMES_S = 0.55
GRID_S = 0.05
PHASES = ("wait", "pack", "forward_backward", "optimizer", "export", "publish", "checkpoint")


def gpu_rows(file: Path, kept: Sequence[int] | None = None) -> GpuRows:
    """Of `nvidia-smi --query-gpu=timestamp,index,memory.used,utilization.gpu` in UTC."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for line in file.read_text().splitlines():
        at, index, used, busy = (one.strip() for one in line.split(","))
        moment = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC)
        if kept is None or int(index) in kept:
            row = (moment.timestamp(), float(used), float(busy))
            found.setdefault(int(index), []).append(row)
    return {index: np.array(rows) for index, rows in found.items()}


def in_bins(gpus: GpuRows, began_s: float, ended_s: float) -> dict[str, Any]:
    """Most MiB used and mean % busy of every two seconds of the job, by GPU."""
    kept: dict[str, Any] = {"bin_s": BIN_S}
    for index, rows in gpus.items():
        inside = rows[(rows[:, 0] >= began_s) & (rows[:, 0] < ended_s)]
        bins = ((inside[:, 0] - began_s) // BIN_S).astype(int)
        parts = [inside[bins == one] for one in np.unique(bins)]
        kept[str(index)] = [
            [float(one) * BIN_S, int(part[:, 1].max()), round(float(part[:, 2].mean()))]
            for one, part in zip(np.unique(bins), parts, strict=True)
        ]
    return kept


def sampler_shares(found: RunEvents) -> dict[str, float]:
    """Of the time from the first to the last step on samples, without a checkpoint behind it."""
    steps = online_steps(found)
    saving_s = steps[-1].fields["seconds"].get("checkpoint", 0.0)
    at = np.arange(steps[0].at_s, steps[-1].at_s - saving_s, GRID_S)
    came = np.array(sorted(event.at_s for event in found.named("group_sampled")))
    after = np.searchsorted(came, at)
    sampling = came[np.minimum(after, len(came) - 1)] - at
    is_sampling = (sampling >= 0) & (sampling < COMES_S)
    paused, prepared, evaluating = (np.zeros(len(at), bool) for _ in range(3))
    for event in found.named("update_committed"):
        pause_s, ends_s = _pause(event)
        paused |= (at >= pause_s) & (at < ends_s)
        prepared |= (at >= event.fields["began_at_s"]) & (at < pause_s)
    for event in found.named("eval_finished"):
        evaluating |= (at >= event.at_s - event.fields["seconds"]) & (at < event.at_s)
    free = ~paused & ~is_sampling & ~evaluating
    shares = {
        "paused": paused,
        "sampling": is_sampling & ~paused,
        "evaluating": evaluating & ~is_sampling & ~paused,
        "nothing to sample, update in preparation": free & prepared,
        "nothing to sample, no update": free & ~prepared,
    }
    return {name: round(float(one.mean()), 4) for name, one in shares.items()}


def online_steps(found: RunEvents) -> list[Event]:
    return [event for event in found.named("step") if not event.fields.get("supervised")]


def _pause(event: Event) -> tuple[float, float]:
    """When the update's pause began and ended."""
    told = event.fields
    begins_s = told["began_at_s"] + told["stage_s"] + told["load_s"]
    return begins_s, begins_s + told["pause_s"]


def window_of(
    found: RunEvents, gpus: GpuRows, began_s: float, window: tuple[float, float]
) -> dict[str, Any]:
    """All that touches the window, in seconds of the job."""
    begins_s, ends_s = window

    def touches(first_s: float, last_s: float) -> bool:
        return last_s > begins_s and first_s < ends_s

    trainer = [one for event in online_steps(found) for one in _phases(event, began_s)]
    update = [one for event in found.named("update_committed") for one in _parts(event, began_s)]
    groups = [
        [round(event.at_s - began_s, 2), event.fields["policy_version"]]
        for event in found.named("group_sampled")
    ]
    return {
        "seconds": [begins_s, ends_s],
        "trainer": [one for one in trainer if touches(*one[1:3])],
        "update": [one for one in update if touches(*one[1:3])],
        "groups": [one for one in groups if touches(one[0], one[0])],
        "gpus": {
            str(index): [
                [round(at - began_s, 2), busy]
                for at, _, busy in rows.tolist()
                if touches(at - began_s, at - began_s)
            ]
            for index, rows in gpus.items()
        },
    }


def _phases(event: Event, began_s: float) -> list[list[Any]]:
    """[name, from, to, step] in order; a step is told when it is over."""
    told = event.fields
    at_s = event.at_s - told["step_seconds"]
    lengths = [(name, told["seconds"].get(name, 0.0)) for name in PHASES]
    return _in_order(lengths, at_s - began_s, told["step"])


def _parts(event: Event, began_s: float) -> list[list[Any]]:
    """[name, from, to, version] in order."""
    told = event.fields
    names = {"stage": "stage_s", "prepare": "load_s", "pause": "pause_s"}
    lengths = [(name, told[key]) for name, key in names.items()]
    return _in_order(lengths, told["began_at_s"] - began_s, told["policy_version"])


def _in_order(lengths: Sequence[tuple[str, float]], at_s: float, number: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    for name, seconds in lengths:
        if seconds > 0.005:
            found.append([name, round(at_s, 2), round(at_s + seconds, 2), number])
        at_s += seconds
    return found
