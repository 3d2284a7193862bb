"""What a truncated sampling distribution means, told where a job is seen."""

from typing import Any

import pytest

from shared.job import Job


def job(**sampling: Any) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 1,
            "mode": "rollout_only",
            "record": True,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 32, "max_response_tokens": 8, **sampling},
        }
    )


def test_the_whole_distribution_needs_no_warning() -> None:
    assert job(temperature=0.7).warnings == []


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_p": 0.95}, "sampling.top_p 0.95:"),
        ({"top_k": 20}, "sampling.top_k 20:"),
        ({"top_p": 0.9, "top_k": 50}, "sampling.top_p 0.9 and top_k 50:"),
    ],
)
def test_a_truncated_distribution_is_warned_of(sampling: dict[str, Any], named: str) -> None:
    (warning,) = job(**sampling).warnings
    assert warning.startswith(named)
    assert "ratios, are of the whole one" in warning


def test_a_distribution_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k 1 draws nothing"):
        job(top_k=1)
