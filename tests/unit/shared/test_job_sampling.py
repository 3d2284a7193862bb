"""What a truncated distribution means, and which jobs are the same twice, told in the job."""

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


@pytest.mark.parametrize(
    ("lag", "sampling", "is_deterministic", "in_waves"),
    [
        (0, {}, True, False),
        (0, {"oversampling": 1.5}, True, True),
        (0, {"min_usable_share": 0.1}, True, True),
        (0, {"extra_samples": 1}, False, False),
        (0, {"max_wait_s": 1.0, "oversampling": 1.5}, False, False),
        (1, {"oversampling": 1.5}, False, False),
    ],
)
def test_a_job_without_lag_is_deterministic_unless_steps_depend_on_time(
    lag: int, sampling: dict[str, Any], is_deterministic: bool, in_waves: bool
) -> None:
    given = job(**sampling).model_dump(exclude={"deterministic"})
    found = Job.model_validate(given | {"algorithm": {"max_lag": lag}})
    assert found.deterministic is is_deterministic
    assert f'"deterministic":{str(is_deterministic).lower()}' in found.model_dump_json()
    assert found.asks_in_waves is in_waves


def test_determinism_may_be_given_up_and_is_refused_with_lag() -> None:
    given = job(oversampling=1.5).model_dump(exclude={"deterministic"})
    given_up = Job.model_validate(given | {"deterministic": False})
    assert (given_up.deterministic, given_up.asks_in_waves) == (False, False)
    for wrong in (
        {"algorithm": {"max_lag": 2}},
        {"sampling": given["sampling"] | {"max_wait_s": 1.0}},
    ):
        with pytest.raises(ValueError, match="deterministic"):
            Job.model_validate(given | {"deterministic": True} | wrong)
