"""How passes of a job's actor round: as it trains, not at all, or as its samplers do.

own      weights and activations by `actor.quantisation`, products by `actor.precision`
none     nothing
sampler  weights as published, activations as served; products of these values are exact
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from services.trainer.engine.rounding import rounded_weights
from services.trainer.fp8.choice import training_products
from services.trainer.fp8.products import products_as
from shared.job import Job
from shared.parity.trace import TraceRounding
from shared.quant.activation import UNQUANTISED, ActivationQuant, embedded_rounding
from shared.quant.policy import Policy


class PassRounding:
    """`policy` is that of the served weights. Optimiser steps, exports and checkpoints belong
    outside: inside, parameters may hold rounded values."""

    def __init__(self, job: Job, model: nn.Module, policy: Policy) -> None:
        actor = job.actor
        self._model, self._policy = model, policy
        self._products = training_products(actor, policy.scale)
        self._rounds_weights = actor.quantisation != "none"
        self._served = embedded_rounding(
            policy.linear, activations=job.rollout.quantise_activations
        )
        self._own = self._served if actor.quantisation == "full" else UNQUANTISED

    @contextmanager
    def of(self, rounding: TraceRounding) -> Iterator[ActivationQuant]:
        """Around forward and backward passes, which are to round the activations it gives."""
        with ExitStack() as stack:
            if rounding == "sampler" or (rounding == "own" and self._rounds_weights):
                stack.enter_context(rounded_weights(self._model, self._policy))
            if rounding == "own":
                stack.enter_context(products_as(self._model, self._products))
            yield {"own": self._own, "none": UNQUANTISED, "sampler": self._served}[rounding]
