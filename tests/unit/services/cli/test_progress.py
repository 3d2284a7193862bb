"""What a terminal is told of a job."""

import io
from typing import Any

import pytest
from rich.console import Console

from services.cli.progress import JobView
from services.cli.tables import before_after_table, verdict
from shared.messages import Event
from shared.registry import Replica


def event(name: str, **fields: Any) -> Event:
    return Event(
        name=name, job_id="demo-1", service="trainer", replica="t", at_s=0.0, fields=fields
    )


def step(number: int, reward: float) -> Event:
    return event(
        "step", step=number, reward_raw=reward, delta_logprob_mean=0.0123, delta_logprob_p99=0.2,
        lag_mean=0.5, lag_max=1, tokens_per_s=1234.0,
    )  # fmt: skip


def drawn(view: JobView, *servers: Replica) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view.block(list(servers), {"dashboard": "http://here/"}))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_step_is_one_line() -> None:
    view = JobView("demo-1")
    view.apply(event("job_started", job={"steps": 60}))
    view.apply(step(1, 0.2))
    line = view.apply(step(2, 0.4))
    assert line is not None
    for part in ("2/60", "0.4", "avg    0.3", "0.0123", "1234 tok/s"):
        assert part in line


def test_a_restart_of_the_trainer_is_told_and_a_resumed_job_is_none() -> None:
    view = JobView("demo-1")
    told = [
        view.apply(one)
        for one in (
            event("job_started", job={"steps": 60}, step=0),
            event("job_started", job={"steps": 60}, step=0),
            step(1, 0.2),
            event("job_started", job={"steps": 60}, step=1),
            event("job_finished", state="paused"),
            event("job_started", job={"steps": 60}, step=1),
        )
    ]
    assert [line for line in told if line and not line.startswith("step")] == [
        "demo-1 started",
        "the trainer was restarted; demo-1 goes on after step 0",
        "the trainer was restarted; demo-1 goes on after step 1",
        "demo-1 paused",
        "demo-1 goes on after step 1",
    ]


def test_the_block_shows_state_evaluation_and_servers() -> None:
    view = JobView("demo-1", steps=60)
    view.apply(step(30, 0.5))
    view.apply(
        event(
            "eval_finished",
            policy_version=30,
            pass_at_k={"1": 0.61},
            pass_at_1_ci=[0.55, 0.67],
            truncated_share=0.03,
        )
    )
    server = Replica(
        service="rollout", name="rollout-0", url="http://x", pid=1, state="serving",
        policy_version=30,
    )  # fmt: skip
    text = drawn(view, server)
    for part in ("30/60", "pass@1 0.610 [0.550, 0.670]", "rollout-0 serving v30", "http://here/"):
        assert part in text


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled", "paused"])
def test_how_a_job_ended_is_told(state: str) -> None:
    view = JobView("demo-1")
    line = view.apply(event("job_finished", state=state, error="rank 0 died"))
    assert view.state == state
    assert line == f"demo-1 {state}: rank 0 died"


def test_an_evaluation_that_is_none_is_shown_as_such() -> None:
    assert "pass@1" in str(JobView("demo-1").apply(event("eval_finished", eval_id="x")))


def test_a_rollback_is_told_when_it_begins_and_when_it_ends() -> None:
    view = JobView("demo-1")
    versions = {"policy_version": 1, "current_version": 5}
    told = [
        view.apply(event("rollback_started", **versions)),
        view.apply(event("rollback_ended", **versions)),
        view.apply(event("rollback_failed", **versions, error="refused")),
    ]
    assert told == [
        "version 1 is served by a rollback: training waits until it is ended "
        "(`tandem status demo-1` says how)",
        "the rollback to version 1 has ended; training goes on with version 5",
        "the rollback to version 1 failed: refused; training goes on with version 5",
    ]


def test_an_unknown_event_tells_nothing() -> None:
    assert JobView("demo-1").apply(event("group_sampled", group_id="a")) is None


def summary(low: float, high: float, p_value: float = 0.001) -> dict[str, Any]:
    def evaluation(version: int) -> dict[str, Any]:
        return {
            "policy_version": version, "suite": "sums", "num_problems": 96,
            "samples_per_problem": 8, "pass_at_k": {"1": 0.5, "8": 0.9},
            "pass_at_k_ci": {"1": [0.4, 0.6]}, "truncated_share": 0.1,
        }  # fmt: skip

    change = {"difference": (low + high) / 2, "low": low, "high": high, "p_value": p_value}
    return {"evaluations": [evaluation(0), evaluation(60)], "before_after": change}


@pytest.mark.parametrize(
    ("low", "high", "p_value", "expected"),
    [
        (0.1, 0.3, 0.025, "rose"),
        (-0.3, -0.1, 0.025, "fell"),
        (0.1, 0.3, 0.026, "No change"),
        (-0.1, 0.3, 0.2, "No change"),
    ],
)
def test_a_change_is_claimed_only_by_the_sign_flip_test(
    low: float, high: float, p_value: float, expected: str
) -> None:
    assert expected in verdict(summary(low, high, p_value))


def test_before_and_after_are_one_table() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(before_after_table(summary(0.1, 0.3)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("version 0", "version 60", "0.500 [0.400, 0.600]", "+0.200 [+0.100, +0.300]"):
        assert part in text
