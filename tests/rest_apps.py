"""The applications of all services, as their processes make them; settings may be given."""

from collections.abc import Callable

from fastapi import FastAPI

from services.evaluator.app import create_app as evaluator
from services.evaluator.config import EvaluatorConfig
from services.reward.app import create_app as reward
from services.reward.config import RewardConfig
from services.rollout.app import create_app as rollout
from services.rollout.config import RolloutConfig
from services.rollout.standalone import StandaloneServer
from services.rollout.standalone import create_app as standalone
from services.trainer.app import create_app as trainer
from services.trainer.config import TrainerConfig

APPS: dict[str, Callable[..., FastAPI]] = {
    "evaluator": lambda **given: evaluator(EvaluatorConfig(**given)),
    "reward": lambda **given: reward(RewardConfig(**given)),
    "rollout": lambda **given: rollout(RolloutConfig(**given)),
    "standalone": lambda **given: standalone(StandaloneServer(RolloutConfig(**given))),
    "trainer": lambda **given: trainer(TrainerConfig(**given)),
}
