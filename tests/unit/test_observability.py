"""Board and alert rules name metrics that the services have, with the labels that these have."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "observability"
KINDS = {"counter", "gauge", "histogram"}
OF_PROMETHEUS = {"up": {"job", "instance"}}
EVERYWHERE = {"instance", "job"}
WORDS = {"and", "avg_over_time", "by", "changes", "histogram_quantile", "increase"}
WORDS |= {"max", "min", "rate", "sum"}


@cache
def declared() -> dict[str, set[str]]:
    """Label names of every metric in the source, by the names under which it is scraped."""
    found: dict[str, set[str]] = {}
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in KINDS:
                _add(found, node)
        in_a_loop = r'\(\s*"(trainer_[a-z_]+)",\s*"[^"]*",\s*"[a-z_]+",?\s*\)'
        for name in re.findall(in_a_loop, source):
            found[name] = set()  # the gauges of a step, declared in a loop
    return found


def _add(found: dict[str, set[str]], call: ast.Call) -> None:
    if not isinstance(call.args[0], ast.Constant):
        return
    name, labels = str(call.args[0].value), set()
    given = call.args[2] if len(call.args) > 2 else None
    if isinstance(given, ast.Tuple):
        labels = {str(one.value) for one in given.elts if isinstance(one, ast.Constant)}
    suffixes = ("_bucket", "_sum", "_count") if call.func.id == "histogram" else ("",)  # type: ignore[attr-defined]
    for suffix in suffixes:
        found[name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana" / "tandem.json").read_text())
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return [
        *(target["expr"] for panel in board["panels"] for target in panel["targets"]),
        *(rule["expr"] for group in rules["groups"] for rule in group["rules"]),
    ]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_exists(expression: str) -> None:
    metrics = declared() | OF_PROMETHEUS
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    labels = {one for part in re.findall(r"by \(([^)]*)\)", bare) for one in part.split(", ")}
    labels |= set(re.findall(r"[{,]\s*([a-z_]+)\s*=", bare))
    names = set(re.findall(r"\b[a-z_]+\b", bare)) - WORDS - labels
    assert names, expression
    assert names <= metrics.keys()
    for label in labels - EVERYWHERE:
        assert any(label in metrics[name] for name in names), label


def test_legends_use_labels_that_their_query_keeps() -> None:
    board = json.loads((FOLDER / "grafana" / "tandem.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.findall(r"by \(([^)]*)\)", target["expr"])
                assert label in EVERYWHERE or any(label in one.split(", ") for one in kept)


def test_every_rule_says_what_to_do() -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "action"}
        for page in re.findall(r"docs/[a-z]+\.md", rule["annotations"]["action"]):
            assert (ROOT / page).is_file()


def test_panels_do_not_overlap() -> None:
    board = json.loads((FOLDER / "grafana" / "tandem.json").read_text())
    places = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        own = {(x, y) for x in columns for y in rows}
        assert not own & places
        places |= own
