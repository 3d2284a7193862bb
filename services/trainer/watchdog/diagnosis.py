"""From what ranks left behind to one sentence: which collective waits, and for whom.

A rank that waits has a collective or a transfer that has not ended. Of those, the one is named
whose missing ranks wait for nothing themselves: the others only wait for those that wait.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_PAIR = re.compile(r"\d+(?:->|<-)(\d+)")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective in which some ranks of its group are, and others are not; or a transfer between
    two, which has no number."""

    collective: str
    """As the flight recorder names it: 'gloo:all_to_all'."""
    group: str
    sequence: int | None
    """Of the collectives of this group."""
    arrived: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    op: str
    phase: str
    step: int
    quiet_s: float
    waiting: Waiting | None
    answered: int
    """Ranks that told what they wait for."""
    states: Mapping[int, str]
    """What each rank that is not in the collective does: 'stopped (SIGSTOP)', 'no answer'."""

    def sentence(self) -> str:
        where = f"{self.op}, {self.phase}" if self.phase not in ("begin", self.op) else self.op
        begin = f"no rank made progress for {self.quiet_s:.0f} s in {where}"
        states = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.states.items()))
        if self.waiting is None:
            told = f"{self.answered} ranks answered" if self.answered else "no rank answered"
            return f"{begin}; no rank is known to wait for another; {states or told}"
        one = self.waiting
        if one.sequence is None:
            waits = "waits" if len(one.arrived) == 1 else "wait"
            return (
                f"{begin}: in a {one.collective}, {_ranks(one.arrived)} {waits} for "
                f"{_ranks(one.missing)}" + (f" ({states})" if states else "")
            )
        if not one.missing:
            return (
                f"{begin}: all ranks of group {one.group} are in {one.collective} number "
                f"{one.sequence}, so the transport between them stands still"
            )
        return (
            f"{begin}: {one.collective} number {one.sequence} of group {one.group} has ranks "
            f"{_listed(one.arrived)} and waits for {_listed(one.missing)}"
            + (f" ({states})" if states else "")
        )

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "states": {str(rank): text for rank, text in self.states.items()},
            "sentence": self.sentence(),
        }


def diagnose(
    beacons: Mapping[int, Mapping[str, Any]],
    traces: Mapping[int, Mapping[str, Any]],
    states: Mapping[int, str],
    *,
    quiet_s: float,
) -> Diagnosis:
    """`beacons` and `traces` by rank as those left them; `states` of the ones that are not well."""
    ranks = sorted({*beacons, *traces, *states})
    waiting = _root([*_all_waiting(traces, ranks), *_transfers(traces)], traces)
    missing = waiting.missing if waiting is not None else tuple(states)
    shown = {rank: states.get(rank) or _place(beacons.get(rank, {})) for rank in missing}
    newest = max(beacons.values(), key=lambda one: (one["op"] != "", one["at_s"]), default={})
    return Diagnosis(
        op=str(newest.get("op", "")),
        phase=str(newest.get("phase", "")),
        step=max((int(one["step"]) for one in beacons.values()), default=-1),
        quiet_s=quiet_s,
        waiting=waiting,
        answered=len(traces),
        states=shown,
    )


def _all_waiting(traces: Mapping[int, Mapping[str, Any]], ranks: Sequence[int]) -> list[Waiting]:
    """Collectives that have not ended on some rank, and who did not come to them."""
    found: dict[tuple[str, int, str], Waiting] = {}
    for trace in traces.values():
        for entry in _collectives(trace):
            group, name = entry["process_group"][0], entry["profiling_name"]
            key = (group, int(entry["collective_seq_id"]), name)
            members = set(_members(traces, group, ranks))
            here = {rank for rank in members if _came(traces.get(rank), key)}
            shown, missing = _described(traces, group), tuple(sorted(members - here))
            found[key] = Waiting(name, shown, key[1], tuple(sorted(here)), missing)
    return list(found.values())


def _came(trace: Mapping[str, Any] | None, key: tuple[str, int, str]) -> bool:
    """Whether a rank is in the collective, or was and went on."""
    if trace is None:
        return False
    group, sequence, _ = key
    inside = any(
        (one["process_group"][0], int(one["collective_seq_id"]), one["profiling_name"]) == key
        for one in _collectives(trace)
    )
    return inside or int(trace["last"].get(group, -1)) >= sequence


def _root(found: Sequence[Waiting], traces: Mapping[int, Mapping[str, Any]]) -> Waiting | None:
    """Somebody is missing, fewest of them wait themselves, and most wait for them."""

    def depth(one: Waiting) -> tuple[bool, int, int]:
        waiting = [rank for rank in one.missing if _waits(traces.get(rank))]
        return not one.missing, len(waiting), -len(one.arrived)

    return min(found, key=depth, default=None)


def _collectives(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in trace["entries"] if not entry["is_p2p"]]


def _transfers(traces: Mapping[int, Mapping[str, Any]]) -> list[Waiting]:
    """By the rank that is waited for."""
    waiting: dict[tuple[str, int], set[int]] = {}
    for rank, trace in traces.items():
        for call, other in _needed(trace):
            waiting.setdefault((call, other), set()).add(rank)
    return [
        Waiting(call, "", None, tuple(sorted(ranks)), (other,))
        for (call, other), ranks in waiting.items()
    ]


def _needed(trace: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Ranks whose part of a transfer is not there, by the rank itself or, for NCCL, its recorder:
    'nccl:recv 1<-0' has ranks of its group."""
    own = trace.get("waits", {"call": "", "ranks": []})
    found = [(str(own["call"]), int(other)) for other in own["ranks"]]
    if found:
        return found
    for entry in trace["entries"]:
        if entry["is_p2p"] and (pair := _PAIR.search(entry["profiling_name"])):
            members = trace["groups"].get(entry["process_group"][0], [])
            other = int(pair[1])
            found.append(("transfer", members[other] if other < len(members) else other))
    return found


def _waits(trace: Mapping[str, Any] | None) -> bool:
    return trace is not None and bool(_collectives(trace) or _needed(trace))


def _members(
    traces: Mapping[int, Mapping[str, Any]], group: str, ranks: Sequence[int]
) -> Sequence[int]:
    for trace in traces.values():
        if members := trace["groups"].get(group):
            return [int(rank) for rank in members]
    return ranks


def _described(traces: Mapping[int, Mapping[str, Any]], group: str) -> str:
    for trace in traces.values():
        for entry in trace["entries"]:
            if entry["process_group"][0] == group and entry["process_group"][1] != "undefined":
                return str(entry["process_group"][1])
    return group


def _place(beacon: Mapping[str, Any]) -> str:
    if not beacon:
        return "never started"
    return f"in {beacon['op'] or 'no operation'}, {beacon['phase']}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
