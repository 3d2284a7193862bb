"""What a model cannot have is refused when a job is submitted, before any process starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from services.trainer.jobs.submission import Refused, check_files
from shared.job import Job, load_job_file

ROOT = Path(__file__).parents[4]


def demo(**actor: Any) -> Job:
    document = load_job_file(ROOT / "configs" / "demo.toml")
    document.pop("eval")
    document["actor"] |= actor  # type: ignore[operator]
    document["cluster"] = {"gpus_per_node": 2} if "parallel" in actor else {}
    return Job.model_validate(document)


@pytest.mark.parametrize(
    ("actor", "complaint"),
    [
        ({"mtp_loss_weight": 0.3}, "the model has no MTP block"),
        (
            {"quantisation": "none", "precision": "fp8", "parallel": {"tensor": 2}},
            "tensor 2 cuts the output group width 128 inside blocks .* so actor.precision must be",
        ),
    ],
)
def test_an_actor_that_the_model_cannot_have_is_refused(
    actor: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    check_files(demo(), [ROOT])
    with pytest.raises(Refused) as refused:
        check_files(demo(**actor), [ROOT])
    (problem,) = refused.value.problems
    assert problem.key == "actor"
    assert re.search(complaint, problem.message), problem.message
