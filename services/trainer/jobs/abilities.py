"""Fields of a job that this build cannot honour yet: refused at submission, never ignored.

Whoever builds a part takes its line out.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from shared.job import Job

_INSTALL = "pip install -r requirements/tracking.txt"
_KEY = "WANDB_API_KEY"


class Lacking(NamedTuple):
    """A field, the values of it that work, and why others do not."""

    key: str
    works: Callable[[Any], bool]
    reason: str


LACKING = (
    *(
        Lacking(f"actor.kernels.{part}", lambda kind: kind == "torch", "only torch is built")
        for part in ("mhc_pre", "mhc_post", "attention", "indexer", "experts", "router")
    ),
    Lacking(
        "actor.kernels.linear",
        lambda kind: kind == "torch" or find_spec("transformer_engine") is not None,
        "TransformerEngine is not installed here; 'torch' emulates FP8 on any device",
    ),
    Lacking(
        "tracking.tensorboard",
        lambda wanted: not wanted or find_spec("tensorboard") is not None,
        f"tensorboard is not installed here; {_INSTALL}",
    ),
    Lacking(
        "tracking.wandb",
        lambda section: section is None or find_spec("wandb") is not None,
        f"wandb is not installed here; {_INSTALL}",
    ),
    Lacking(
        "tracking.wandb",
        lambda section: section is None or section.mode == "offline" or _KEY in os.environ,
        f"mode 'online' needs {_KEY} in the trainer's environment",
    ),
)


def lacking(job: Job) -> list[tuple[str, Any, str]]:
    """Key, value and reason of everything that the job asks for and that is not there."""
    found = [(field, _value(job, field.key)) for field in LACKING]
    return [(field.key, value, field.reason) for field, value in found if not field.works(value)]


def _value(job: Job, key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return value
