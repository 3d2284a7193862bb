"""How a rank finds the conductor: rank 0 by its channel, those of other nodes not at all."""

import sys

import pytest

from services.trainer import learner
from services.trainer.launch import ADDRESS_VARIABLE


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as torchrun does on a node whose environment has no channel."""
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["services.trainer.learner"])
    monkeypatch.setattr(learner, "die_with_parent", lambda: None)
    monkeypatch.setattr(learner, "configure_logging", lambda *_, **__: None)


def test_a_rank_of_another_node_needs_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[object] = []
    monkeypatch.setattr(learner, "run", served.append)
    monkeypatch.setenv("RANK", "1")
    learner.main()
    assert served == [None]


def test_rank_0_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        learner.main()
    assert f"give --channel or set {ADDRESS_VARIABLE}" in capsys.readouterr().err
