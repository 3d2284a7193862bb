import io
import json

import numpy as np
import pytest
from rich.console import Console

from services.evaluator.parity.page import render_page
from services.evaluator.parity.report import ParityReport, Run, make_report
from services.evaluator.parity.terminal import print_report
from shared.parity.offline_request import WalkPoint, WalkResult
from shared.parity.scores import Bounds, ScoredSequence

WALK = WalkResult(
    mode="chained",
    verdict="layer 2 · mHC merge after experts departs by 0.3 at row 4",
    first="layer 2 · mHC merge after experts",
    suspects=["layer 2 · mHC merge after experts"],
    tolerance=1e-4,
    num_tokens=12,
    points=[
        WalkPoint(name="embed", label="embedding", departure=0.0, row=0),
        WalkPoint(name="x", label="layer 2 · mHC merge after experts", departure=0.3, row=4),
        WalkPoint(name="logits", label="output head", departure=None, row=4),
    ],
)


def report(
    *, bad: bool = False, mean: float | None = 0.04, walk: WalkResult | None = WALK
) -> ParityReport:
    ours = np.full(20, -1.0)
    theirs = ours - np.linspace(0, 0.2, 20)
    if bad:
        theirs[3] = np.nan
    sequence = ScoredSequence(tuple(range(22)), 2, ours, theirs)
    run = Run(
        ours="sampler <b>",
        theirs="trainer",
        sequences=[sequence],
        decoding=[sequence],
        sampled_by_ours=True,
        policy_version=7,
        argmax_agreement=0.95,
        routing_agreement={0: 1.0, 1: 0.5},
        walk=walk,
        notes=["a note"],
    )
    return make_report(run, Bounds(mean=mean), decode=lambda ids: "<i>" + "|".join(map(str, ids)))


def shown(found: ParityReport) -> str:
    file = io.StringIO()
    print_report(found, Console(file=file, width=200))
    return file.getvalue()


def test_terminal_says_everything_once() -> None:
    text = shown(report())
    for expected in (
        "sampler <b> against trainer, version 7",
        "20 in 1 sequences",
        "95.00%",
        "50.00% in layer 1, the lowest",
        "sampler against its own score",
        "layer walk (chained): layer 2 · mHC merge after experts departs by 0.3",
        "a note",
        "FAIL: mean |Δ log p| 0.1 exceeds 0.04",
        "⟦<i>21⟧",
    ):
        assert text.count(expected) == 1, expected
    assert "PASS: within the bounds" in shown(report(mean=None, walk=None))


def test_json_has_null_for_what_is_not_finite_and_reads_back() -> None:
    found = report(bad=True)
    document = json.loads(found.model_dump_json(), parse_constant=lambda name: pytest.fail(name))
    assert document["worst"][0]["theirs"] is None
    assert document["worst"][0]["position"] == 5
    assert "1 of 20 log p are not finite" in document["violations"]
    assert ParityReport.model_validate(document).figures == found.figures


def test_page_is_whole_and_escaped() -> None:
    html = render_page(report(bad=True))
    assert html.count("data:image/png;base64,") == 2
    assert "http://" not in html
    assert "https://" not in html
    assert "sampler &lt;b&gt;" in html
    assert "<b>" not in html.replace("<b>FAIL</b>", "")
    assert "&lt;i&gt;21" in html
    assert "<i>" not in html
    assert "layer 2 · mHC merge after experts departs" in html
    assert 'width:100%"' in html


def test_page_of_equal_sides_can_be_drawn() -> None:
    values = np.full(3, -1.0)
    run = Run(
        ours="a",
        theirs="a",
        sequences=[ScoredSequence((1, 2, 3, 4), 1, values, values)],
        sampled_by_ours=False,
    )
    found = make_report(run, Bounds())
    assert found.passed
    assert "PASS" in render_page(found)
    assert "did not sample these tokens: k1, k3 are no KL" in shown(found)


def test_a_departure_that_the_walk_names_fails_the_report() -> None:
    found = report(mean=None)
    assert not found.passed
    assert found.violations == [f"the layer walk names a departure: {WALK.verdict}"]
