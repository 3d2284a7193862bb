"""What a message refuses to be, wherever it was made."""

import math

import pytest

from shared.errors import Rejected
from shared.messages import MAX_SCORE, Score


@pytest.mark.parametrize("value", [MAX_SCORE, -MAX_SCORE, 0.0])
def test_a_score_up_to_the_bound_arrives(value: float) -> None:
    assert Score.unpack(Score(value=value).pack()).value == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.7e308, r"value 1\.7e\+308 is beyond the bound of a score, 1e\+06 either way"),
        (math.nextafter(-MAX_SCORE, -math.inf), "beyond the bound"),
        (math.nan, "value nan is not finite"),
        (-math.inf, "value -inf is not finite"),
    ],
)
def test_a_score_beyond_it_is_refused_with_value_and_bound(value: float, message: str) -> None:
    with pytest.raises(Rejected, match=message):
        Score.unpack(Score.model_construct(value=value).pack())
