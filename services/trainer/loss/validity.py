"""What counts as a recorded log-probability; no torch, because the conductor asks, too."""

import numpy as np
import numpy.typing as npt

# A log-softmax may round to slightly above zero; more is not a log-probability.
POSITIVE_TOLERANCE = 1e-4


def are_logprobs(values: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """True where a value is one: not NaN, not infinite, not above zero."""
    found: npt.NDArray[np.bool_] = np.isfinite(values) & (values <= POSITIVE_TOLERANCE)
    return found
