"""How much of |Δ log p| between sampler and trainer comes from where; numpy only.

The same tokens are scored on a ladder that leads from trainer to sampler, one source a rung:

    own        as the trainer trains, with the weights that it holds
    quantised  weights and activations rounded as the sampler rounds them
    routed     and its tokens sent to the experts that the sampler chose
    selected   and attending to the compressed entries that the sampler's indexer selected
    sampled    and with the weights of the version that sampled
    (sampler)  what the sampler recorded; what is left between the last two is the rest

A source's part is the mean over tokens of sign(Δ) · (its rung - the rung before). Summed over the
ladder that is sign(Δ) · Δ = |Δ| of every token: the parts add up to the whole exactly. A part is
negative where a source moves away from the sampler. What an earlier rung explains is no later
one's: an expert that flips because of rounding counts as quantisation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RUNGS = ("own", "quantised", "routed", "selected", "sampled")
SOURCES = ("quantisation", "routing flips", "indexer flips", "staleness")
REST = "rest"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Attribution:
    """Means over `num_tokens` tokens; `parts` has a value for each of SOURCES and the rest."""

    num_tokens: int
    whole: float
    parts: dict[str, float]

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """The largest first."""
        return sorted(self.parts.items(), key=lambda item: -item[1])

    @property
    def explained_share(self) -> float:
        """Of the whole, by the named sources, 0 to 1; 1 where there is nothing to explain."""
        return max(0.0, 1 - abs(self.parts[REST]) / self.whole) if self.whole > 0 else 1.0


def attribute(sampler: Floats, ladder: Mapping[str, Floats]) -> Attribution:
    """`ladder` has log p of the sampled tokens [N] on each of RUNGS. Tokens of which a value is not
    finite are left out; ValueError if none is left or the sizes differ."""
    rungs = np.stack([*(np.asarray(ladder[name], np.float64) for name in RUNGS), sampler])
    rungs = rungs[:, np.isfinite(rungs).all(0)]
    if not rungs.shape[1]:
        raise ValueError("no token has a log-probability on every rung")
    steps = np.diff(rungs, axis=0)
    total = rungs[-1] - rungs[0]
    means = (np.sign(total) * steps).mean(1)
    parts = dict(zip((*SOURCES, REST), means.tolist(), strict=True))
    return Attribution(rungs.shape[1], float(np.abs(total).mean()), parts)
