"""Board and alert rules by themselves.

Their metrics and labels are held against what running services answer in
tests/e2e/test_operated_run.py, and all of it against Prometheus in tests/compose.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.observability import ADDED, Asked, board, queries, rules

ROOT = Path(__file__).parents[2]
_MISSING: dict[str, Any] = {}


@pytest.mark.parametrize("asked", queries(), ids=lambda one: one.where)
def test_every_query_parses_and_asks_for_something(asked: Asked) -> None:
    assert asked.metrics


@pytest.mark.parametrize("asked", queries(), ids=lambda one: one.where)
def test_both_sides_of_an_operator_have_labels_that_can_match(asked: Asked) -> None:
    """`sum(x)` has none, so nothing with an instance is ever joined to it unless `on` says how."""
    for node in asked.nodes:
        if isinstance(node, promql.BinaryExpr):
            is_told = node.modifier is not None and node.modifier.matching is not None
            left, right = labels_of(node.lhs), labels_of(node.rhs)
            assert is_told or left is None or right is None or left == right, node.prettify()


def labels_of(node: Any) -> frozenset[str] | None:
    """Those that Prometheus adds and the expression still has; None of a number."""
    match node:
        case promql.NumberLiteral() | promql.StringLiteral():
            return None
        case promql.AggregateExpr():
            kept = node.modifier.labels if node.modifier is not None else []
            return frozenset(kept) & ADDED
        case promql.BinaryExpr():
            left = labels_of(node.lhs)
            return labels_of(node.rhs) if left is None else left
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels_of(node.expr)
        case promql.Call():
            return next((found for one in node.args if (found := labels_of(one)) is not None), None)
        case _:
            return frozenset(ADDED)


def test_an_aggregate_beside_a_plain_metric_is_noticed() -> None:
    never = Asked("as it once was", "changes(trainer_step[30m]) == 0 and sum(trainer_open_groups)")
    with pytest.raises(AssertionError, match="sum"):
        test_both_sides_of_an_operator_have_labels_that_can_match(never)


def test_legends_use_labels_that_their_query_keeps() -> None:
    for panel in board()["panels"]:
        for target in panel["targets"]:
            asked = Asked(panel["title"], target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                plain = not any(isinstance(one, promql.AggregateExpr) for one in asked.nodes)
                assert label in asked.kept or (plain and label in ADDED), asked


def test_every_rule_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action"}
        for page in re.findall(r"docs/[a-z]+\.md", rule["annotations"]["action"]):
            assert (ROOT / page).is_file()


def test_grafana_knows_every_key_of_the_board() -> None:
    """Its own model of a board keeps what it knows: https://github.com/grafana/grafana-foundation-sdk."""
    register_default_plugins()
    told = board()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(told)))
    assert list(_lost(told, kept)) == []
    panel = told["panels"][6]
    panel["options"]["legend"]["showlegend"] = panel["targets"][0]["expression"] = "a slip"
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(told)))
    assert set(_lost(told, kept)) == {
        ".panels.6.options.legend.showlegend", ".panels.6.targets.0.expression",
    }  # fmt: skip


def _lost(told: Any, kept: Any, place: str = "") -> Iterator[str]:
    if isinstance(told, dict):
        for key, value in told.items():
            yield from _lost(value, kept.get(key, _MISSING), f"{place}.{key}")
    elif isinstance(told, list):
        for at, (one, other) in enumerate(zip(told, kept, strict=True)):
            yield from _lost(one, other, f"{place}.{at}")
    elif told != kept:
        yield place


def test_panels_do_not_overlap() -> None:
    places = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        own = {(x, y) for x in columns for y in rows}
        assert not own & places
        places |= own
