"""What board and alert rules ask of Prometheus, read by a port of its own parser."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

FOLDER = Path(__file__).parents[1] / "docker" / "observability"
ADDED = {"instance", "job"}  # by Prometheus, to all that it reads


@dataclass(frozen=True, slots=True)
class Asked:
    """One query. `metrics` have the labels that they are selected by."""

    where: str
    text: str

    @property
    def parsed(self) -> Any:
        return promql.parse(self.text)

    @property
    def nodes(self) -> list[Any]:
        found: list[Any] = []
        promql.walk(self.parsed, found.append)
        return found

    @property
    def metrics(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            one = getattr(node, "vector_selector", node)
            if isinstance(one, promql.VectorSelector):
                labels = {matcher.name for matcher in one.matchers.matchers}
                found[one.name] = found.get(one.name, set()) | labels
        return found

    @property
    def kept(self) -> set[str]:
        """Labels that its aggregations keep."""
        return {label for node in self.nodes for label in _grouping(node)}


def _grouping(node: Any) -> list[str]:
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        return list(node.modifier.labels)
    return []


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana" / "tandem.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> list[Asked]:
    return [*_of_board(), *(Asked(rule["alert"], rule["expr"]) for rule in rules())]


def _of_board() -> Iterator[Asked]:
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield Asked(f"{panel['title']} {target['refId']}", target["expr"])
