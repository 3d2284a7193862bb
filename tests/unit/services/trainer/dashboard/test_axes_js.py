"""Ticks and ranges of the charts' axes, run by Node.js where there is one."""

import itertools
import json
import math
from pathlib import Path

import pytest

from tests.unit.services.trainer.dashboard.javascript import NODE, evaluate

pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def test_a_logarithmic_axis_has_its_decades_and_a_few_labels(tmp_path: Path) -> None:
    lows = [1e-15, 9.99e-9, 9.6e-4, 0.0999, 1.0, 2.05, 5.1, 1145.0, 9.9e29]
    cases = list(itertools.product(lows, [2.25, 1e3, 1e45]))
    ranges = json.dumps([(low, low * span) for low, span in cases])
    script = f"""answer = {ranges}.map(([low, high]) => {{
      const ticks = page.logarithmicTicks(low, high);
      return [ticks, page.labelledTicks(ticks).filter((tick) => tick !== null)];
    }})"""
    for (low, span), (ticks, labels) in zip(cases, evaluate(tmp_path, "axes", script), strict=True):
        assert 1 <= len(ticks) <= 109
        assert all(low <= tick <= low * span for tick in ticks)
        decades = {exponent for tick in ticks if (exponent := math.log10(tick)).is_integer()}
        assert len(decades) >= math.floor(math.log10(span))
        assert 1 <= len(labels) <= 12, (low, span, labels)


def test_what_no_run_means_is_a_gap(tmp_path: Path) -> None:
    column = "[1, 0, -1, 5e-324, 1e300, 1 / 0, 0 / 0, null, 'x']"
    script = f"answer = [false, true].map((log) => page.drawable([[7], {column}], log))"
    gap = None
    assert evaluate(tmp_path, "axes", script) == [
        [[7], [1, 0, -1, 5e-324, gap, gap, gap, gap, gap]],
        [[7], [1, gap, gap, gap, gap, gap, gap, gap, gap]],
    ]


def test_an_axis_of_zeros_goes_to_one(tmp_path: Path) -> None:
    assert evaluate(tmp_path, "axes", "answer = [page.padded(0, 0), page.padded(0, 0.5)]") == [
        [0, 1],
        [0, 0.53],
    ]
