"""Diagnoses from made-up traces: the group that only waits for those that wait is not the cause."""

from typing import Any

from services.trainer.watchdog.diagnosis import diagnose


def entry(group: str, sequence: int, name: str, described: str = "undefined") -> dict[str, Any]:
    return {
        "process_group": [group, described],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
    }


def trace(*entries: dict[str, Any], **last: int) -> dict[str, Any]:
    groups = {"world": [0, 1, 2, 3], "pair": [2, 3]}
    return {"entries": list(entries), "last": last, "groups": groups}


def beacon(rank: int, op: str = "train_step", phase: str = "optimizer") -> dict[str, Any]:
    return {"rank": rank, "op": op, "phase": phase, "step": 7, "at_s": float(rank)}


def test_the_cause_is_the_group_whose_missing_ranks_wait_for_nothing() -> None:
    """0 and 1 wait for 2 in the world, 2 waits for 3 in the pair, 3 is stopped."""
    found = diagnose(
        {rank: beacon(rank) for rank in range(4)},
        {
            0: trace(entry("world", 5, "nccl:all_reduce"), world=5),
            1: trace(entry("world", 5, "nccl:all_reduce"), world=5),
            2: trace(entry("pair", 9, "nccl:all_gather", "experts"), world=4, pair=9),
        },
        {3: "stopped (SIGSTOP)"},
        quiet_s=600,
    )
    assert found.waiting is not None
    assert (found.waiting.collective, found.waiting.group) == ("nccl:all_gather", "experts")
    assert (found.waiting.arrived, found.waiting.missing) == ((2,), (3,))
    assert found.sentence() == (
        "no rank made progress for 600 s in train_step, optimizer: nccl:all_gather number 9 of "
        "group experts has ranks 2 and waits for 3 (rank 3: stopped (SIGSTOP))"
    )


def test_a_rank_that_was_there_and_went_on_is_not_missing() -> None:
    found = diagnose(
        {rank: beacon(rank) for rank in range(4)},
        {
            0: trace(entry("world", 5, "gloo:broadcast"), world=5),
            1: trace(entry("pair", 1, "gloo:all_to_all"), world=5, pair=1),
            2: trace(world=4),
            3: trace(world=6),
        },
        {},
        quiet_s=60,
    )
    assert found.waiting is not None
    assert (found.waiting.arrived, found.waiting.missing) == ((0, 1, 3), (2,))
    assert found.states == {2: "in train_step, optimizer"}


def test_ranks_that_compute_or_are_gone_are_told_apart() -> None:
    found = diagnose({0: beacon(0)}, {0: trace()}, {1: "dead"}, quiet_s=60)
    assert found.waiting is None
    assert "no rank is known to wait for another; rank 1: dead" in found.sentence()
    assert found.document()["states"] == {"1": "dead"}


def test_without_any_answer_it_still_says_so() -> None:
    assert "never started" in diagnose({}, {}, {0: "never started"}, quiet_s=1).sentence()


def test_a_collective_with_everybody_in_it_is_the_transports() -> None:
    inside = trace(entry("pair", 3, "gloo:all_to_all"), pair=3)
    found = diagnose({2: beacon(2), 3: beacon(3)}, {2: inside, 3: inside}, {}, quiet_s=60)
    assert "the transport between them stands still" in found.sentence()


def test_ranks_that_all_answer_and_wait_for_nobody_are_said_to_have_answered() -> None:
    found = diagnose({0: beacon(0)}, {0: trace(), 1: trace()}, {}, quiet_s=60)
    assert "2 ranks answered" in found.sentence()


def test_the_stage_that_others_wait_for_is_named() -> None:
    """Of four stages the second is stopped: its neighbours need it, the last needs the third."""

    def needs(*ranks: int) -> dict[str, Any]:
        return trace(world=3) | {"waits": {"call": "pipeline transfer", "ranks": ranks}}

    found = diagnose(
        {rank: beacon(rank) for rank in range(4)},
        {0: needs(1), 2: needs(1), 3: needs(2)},
        {1: "stopped (SIGSTOP)"},
        quiet_s=60,
    )
    assert found.sentence().endswith(
        "in a pipeline transfer, ranks 0, 2 wait for rank 1 (rank 1: stopped (SIGSTOP))"
    )


def test_transfers_of_nccls_recorder_are_between_two_ranks() -> None:
    """Its names have ranks of the group; its numbers are no collectives'."""

    def transfer(name: str) -> dict[str, Any]:
        return entry("pair", 0, name) | {"is_p2p": True, "p2p_seq_id": 7}

    found = diagnose(
        {2: beacon(2)},
        {2: trace(transfer("nccl:recv 0<-1"), pair=9)},
        {3: "stopped (SIGSTOP)"},
        quiet_s=60,
    )
    assert found.waiting is not None
    assert (found.waiting.arrived, found.waiting.missing) == ((2,), (3,))
    both = {rank: trace(transfer(f"nccl:send {rank - 2}->{3 - rank}"), pair=9) for rank in (2, 3)}
    still = diagnose({}, both, {}, quiet_s=60)
    assert still.waiting is not None
    assert still.waiting.sequence is None
