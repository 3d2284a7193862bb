"""Who counts when prompts are divided; server `a` asks."""

from typing import Any

import pytest

from services.rollout.peers import Peers
from shared.registry import Replica

PATIENCE_S = 10.0


def replica(name: str, **fields: Any) -> Replica:
    document: dict[str, Any] = {"state": "serving", "policy_version": 3, "job_id": "j"}
    return Replica(service="rollout", name=name, url="http://x", pid=1, **(document | fields))


def count(peers: Peers, *replicas: Replica, held: tuple[str, ...] = (), now_s: float = 0.0) -> int:
    return peers.count(
        replicas, job_id="j", announced=3, held=held, patience_s=PATIENCE_S, now_s=now_s
    )


@pytest.mark.parametrize(
    "other",
    [
        {"job_id": "another"},
        {"state": "starting", "policy_version": None},
        {"state": "stopped", "policy_version": None},
        {"state": "idle", "policy_version": None},
        {"paused": True},
    ],
)
def test_servers_that_take_nothing_do_not_count(other: dict[str, Any]) -> None:
    assert count(Peers(), replica("a"), replica("b", **other)) == 1


def test_servers_held_for_an_evaluation_do_not_count() -> None:
    assert count(Peers(), replica("a"), replica("b"), held=("b",)) == 1
    assert count(Peers(), replica("a"), replica("b"), held=("a", "b")) == 1


@pytest.mark.parametrize(
    "late",
    [
        {"policy_version": 2},
        {"state": "updating", "policy_version": 2},
        {"state": "waiting_for_weights", "policy_version": None},
    ],
)
def test_a_late_server_counts_until_its_deadline(late: dict[str, Any]) -> None:
    """It is between two versions, or will never be back; it counts again once it is current."""
    peers = Peers()
    for now_s, expected in ((100.0, 2), (109.0, 2), (111.0, 1), (500.0, 1)):
        assert count(peers, replica("a"), replica("b", **late), now_s=now_s) == expected
    assert count(peers, replica("a"), replica("b"), now_s=501.0) == 2
    assert count(peers, replica("a"), replica("b", **late), now_s=502.0) == 2  # the next update
