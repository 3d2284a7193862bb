"""The actor in float64, where rounding flips no code: for tests that hold to 1e-10."""

from torch import Tensor

from services.trainer.models.deepseek_v4.config import transformer_config
from services.trainer.models.deepseek_v4.model import DeepSeekV4
from services.trainer.models.deepseek_v4.weights import load_weights
from shared.models.deepseek_v4.architecture import Architecture


def float64(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: w.double() if w.is_floating_point() else w for n, w in weights.items()}


def float64_actor(arch: Architecture, weights: dict[str, Tensor]) -> DeepSeekV4:
    model = DeepSeekV4(transformer_config(arch), arch, freeze_router=False).double()
    load_weights(model, weights)
    return model
