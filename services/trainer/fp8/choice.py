"""Which products a job's actor trains with."""

from services.trainer.fp8.emulated import EmulatedFp8
from services.trainer.fp8.products import EXACT, Products
from shared.job_actor import ActorSection
from shared.quant.policy import ScaleType


def training_products(actor: ActorSection, scale: ScaleType) -> Products:
    """`scale` is that of the served weights. Raises ValueError where TransformerEngine is asked for
    and cannot be had."""
    if actor.precision == "dtype":
        return EXACT
    if actor.kernels.linear == "torch":
        return EmulatedFp8(scale)
    from services.trainer.fp8.transformer_engine import load

    return load(scale)
