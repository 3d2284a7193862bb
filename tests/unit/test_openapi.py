"""Every service's REST says what each field, parameter and route is."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from services.evaluator.app import create_app as evaluator
from services.evaluator.config import EvaluatorConfig
from services.reward.app import create_app as reward
from services.reward.config import RewardConfig
from services.rollout.app import create_app as rollout
from services.rollout.config import RolloutConfig
from services.trainer.app import create_app as trainer
from services.trainer.config import TrainerConfig

# What FastAPI itself makes of a refused request.
OF_FASTAPI = {"HTTPValidationError", "ValidationError"}
APPS = {
    "evaluator": lambda: evaluator(EvaluatorConfig()),
    "reward": lambda: reward(RewardConfig()),
    "rollout": lambda: rollout(RolloutConfig()),
    "trainer": lambda: trainer(TrainerConfig()),
}


def undescribed(app: FastAPI) -> Iterator[str]:
    document = app.openapi()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            if not route.get("description") and not route.get("summary"):
                yield f"{method} {path}"
            yield from (
                f"{method} {path}?{one['name']}"
                for one in route.get("parameters", ())
                if one["in"] != "path" and not one.get("description")
            )
    for name, schema in document["components"]["schemas"].items():
        if name not in OF_FASTAPI:
            yield from _fields(name, schema)


def _fields(name: str, schema: dict[str, Any]) -> Iterator[str]:
    for field, described in schema.get("properties", {}).items():
        if not described.get("description") and "const" not in described:
            yield f"{name}.{field}"


def test_a_submission_is_described_as_a_job() -> None:
    document = APPS["trainer"]().openapi()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/Job"}
    sections = {name for name in document["components"]["schemas"] if name.endswith("Section")}
    assert len(sections) >= 20


@pytest.mark.parametrize("service", APPS)
def test_every_field_is_described(service: str) -> None:
    assert list(undescribed(APPS[service]())) == []
