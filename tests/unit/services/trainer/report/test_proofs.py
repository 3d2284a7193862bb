"""What the page says of preflight and drift, from events made by hand."""

from typing import Any

from services.trainer.report.proofs import PREFLIGHT_COLUMNS, PREFLIGHT_HEAD, attribution_sentence


def attributed(num_tokens: int, **parts: float) -> dict[str, Any]:
    return {"step": 1, "num_tokens": num_tokens, "whole": sum(parts.values()), "parts": parts}


def test_the_first_source_over_all_steps_is_named_with_its_share() -> None:
    few = attributed(100, staleness=0.01, quantisation=0.03)
    many = attributed(300, staleness=0.07, quantisation=0.01)
    said = attribution_sentence([few, many])
    # tokens decide: (100 x 0.01 + 300 x 0.07) / 400 = 0.055 of (100 x 0.04 + 300 x 0.08) / 400
    assert said.startswith(
        "Staleness makes 78.6 % of the mean |Δ log p| 0.07 over the 2 steps that were asked; "
        "then quantisation 21.4 %."
    )


def test_no_drift_and_no_step_are_told_apart() -> None:
    assert attribution_sentence([]) == ""
    said = attribution_sentence([attributed(10, staleness=0.0, rest=0.0)])
    assert said == "Sampler and trainer agree on every token of the step asked: there is no drift."


def test_each_column_of_the_preflight_is_explained() -> None:
    _, alike, *others = PREFLIGHT_HEAD
    for column in [*str(alike).split(" rounding "), *others]:
        assert column.lower() in PREFLIGHT_COLUMNS.lower()
