"""Predicts memory and traffic of an actor's layout before anybody rents a node; no torch.

    parameters ─┐
    activations ├─> stages ─> plan ─> advice (the smallest change that would fit)
    traffic ────┘

Every figure is arithmetic on shapes; what is assumed rather than counted has a named constant.
"""

from shared.planner.plan import Plan, plan
from shared.planner.setup import Machine

__all__ = ["Machine", "Plan", "plan"]
