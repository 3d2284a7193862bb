"""What a group must be before it may become part of a batch."""

from types import SimpleNamespace

import pytest

from services.trainer.collector import Collector
from shared.errors import Rejected
from tests.unit.services.trainer.test_batches import RIGHT, WRONG, scored


def collector(*, vocab_size: int = 256, longest: int = 4, newest: int = 3) -> Collector:
    made = Collector.__new__(Collector)
    sampling = SimpleNamespace(max_response_tokens=longest)
    job = SimpleNamespace(sampling=sampling)
    made._source = SimpleNamespace(vocab_size=vocab_size, job=job)
    made._progress = SimpleNamespace(policy_version=newest)
    return made


def test_rollouts_within_the_jobs_bounds_pass() -> None:
    collector()._check_rollouts(scored(RIGHT, WRONG, lengths=(4, 0)))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"longest": 3}, "4 response tokens, the job allows 3"),
        ({"vocab_size": 1}, "the vocabulary has 1"),
        ({"newest": 2}, "sampled by version 3, the newest one is 2"),
    ],
)
def test_rollouts_beyond_them_are_rejected(bounds: dict[str, int], message: str) -> None:
    with pytest.raises(Rejected, match=message):
        collector(**bounds)._check_rollouts(scored(RIGHT, WRONG, lengths=(4, 4)))
