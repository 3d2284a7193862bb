"""The contract of engines takes both sides of a router's near tie, and nothing else."""

import numpy as np
import pytest

from tests.engine_contract import PROMPT, assert_logprobs, rounding_branches, variant

# Layer 2 ranks two experts 6e-8 apart at the twelfth of these tokens.
TIED = [*PROMPT, 1, 1, 56, 59, 168, 1, 56, 59]
TAIL = slice(len(PROMPT) - 1, None)


def test_both_choices_at_a_near_tie_are_right() -> None:
    branches = [one[TAIL] for one in rounding_branches(variant(0), TIED)]
    seventh = sorted(float(one[6]) for one in branches)
    assert seventh[-1] - seventh[0] > 0.05
    for one in branches:
        assert_logprobs(one, variant(0), TIED, TAIL)


@pytest.mark.parametrize("token", [0, 6, 7])
def test_what_no_rounding_explains_is_refused(token: int) -> None:
    found = rounding_branches(variant(0), TIED)[0][TAIL].copy()
    found[token] += 1e-3
    with pytest.raises(AssertionError, match="Not equal"):
        assert_logprobs(found, variant(0), TIED, TAIL)
    found[token] = np.nan
    with pytest.raises(AssertionError, match="nan"):
        assert_logprobs(found, variant(0), TIED, TAIL)
