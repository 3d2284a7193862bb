"""Who works and who waits for whom, instant by instant, from the spans of a time line.

The work goes round: trainer draws ─> rollout samples ─> reward grades ─> trainer trains. A process
that does nothing waits for whoever holds, at that instant, the group that it takes up next; if that
one does nothing either, for the one that it waits for. What nobody works on is on its way
("hand-over"). Shares of one process, of all instants of the window, add up to one.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.trainer.profile.timeline import Process, Timeline
from shared.spans import Span

WORKS, NOTHING, HAND_OVER = "works", "nothing to do", "hand-over"
# Parts of a step in which the trainer waits for its ranks.
ASKS_RANKS = frozenset({"train", "export", "checkpoint", "attribute"})


@dataclass(frozen=True, slots=True)
class Waits:
    """Of one process: shares of the window. `for_whom` is by process, or is the hand-over."""

    process: str
    kind: str
    works: float
    nothing_to_do: float
    for_whom: dict[str, float]

    @property
    def idle(self) -> float:
        """Waiting, with something to wait for."""
        return sum(self.for_whom.values())

    def document(self) -> dict[str, Any]:
        return {
            "process": self.process,
            "kind": self.kind,
            "works": self.works,
            "waits": self.idle,
            "waits_for": self.for_whom,
            "nothing_to_do": self.nothing_to_do,
        }


def waits_of(line: Timeline) -> list[Waits]:
    """One entry for each process, in the time line's order."""
    ring = _Ring.of(line)
    spent: dict[str, Counter[str]] = {one.name: Counter() for one in line.processes}
    for begin_ns, end_ns, active in _instants(line):
        for one in line.processes:
            spent[one.name][ring.culprit(one.name, active, begin_ns)] += end_ns - begin_ns
    total = max(1, line.end_ns - line.begin_ns)
    return [
        Waits(
            one.name,
            one.kind,
            works=spent[one.name].pop(WORKS, 0) / total,
            nothing_to_do=spent[one.name].pop(NOTHING, 0) / total,
            for_whom={who: ns / total for who, ns in spent[one.name].most_common()},
        )
        for one in line.processes
    ]


def sentences(waits: list[Waits]) -> list[str]:
    """The largest idle share of all, that of ranks and engines, and who is waited for most."""
    if not waits:
        return []
    told = [_idlest("Largest idle share", _workers(waits))]
    costly = [one for one in waits if one.kind in ("rank", "engine")]
    if costly:
        told.append(_idlest("Of ranks and engines", costly))
    if (slowest := most_waited_for(waits)) is not None:
        told.append(f"Most waited for: {slowest}.")
    return told


def most_waited_for(waits: list[Waits]) -> str | None:
    """By the time that all processes together wait for it."""
    total: Counter[str] = Counter()
    for one in _workers(waits):
        total.update({who: share for who, share in one.for_whom.items() if who != HAND_OVER})
    return max(total, key=lambda who: total[who]) if total else None


def _workers(waits: list[Waits]) -> list[Waits]:
    """Without those that only ask others: the trainer its ranks, a sampling service its engine."""
    asks = {"trainer", "evaluator"} | (
        {"rollout"} if any(w.kind == "engine" for w in waits) else set()
    )
    return [one for one in waits if one.kind not in asks]


def _idlest(what: str, waits: list[Waits]) -> str:
    one = max(waits, key=lambda each: each.idle, default=None)
    if one is None or not one.for_whom:
        return f"{what}: none."
    who, share = next(iter(one.for_whom.items()))
    return f"{what}: {one.process}, {one.idle:.0%}; it waits for {who} ({share:.0%})."


Active = Mapping[str, Mapping[str, "Counter[str]"]]
"""By process and track: names of the spans that are under way."""


@dataclass(frozen=True, slots=True)
class _Life:
    """Of one group, in nanoseconds; a stage that was not seen has no times."""

    sampled_by: str = ""
    sampling: tuple[int, int] | None = None
    graded_by: str = ""
    grading: tuple[int, int] | None = None


@dataclass(slots=True)
class _Ring:
    """Which process stands where, and each group's way through them."""

    kinds: dict[str, str]
    owners: dict[str, str]  # engine -> its service
    engines: dict[str, str]  # service -> its engine
    lives: dict[str, _Life] = field(default_factory=dict)
    begins: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # (when, group)
    waits: list[tuple[int, int, str]] = field(default_factory=list)  # of the trainer: last group

    @classmethod
    def of(cls, line: Timeline) -> "_Ring":
        engines = {one.owner: one.name for one in line.processes if one.kind == "engine"}
        ring = cls(
            {one.name: one.kind for one in line.processes},
            {name: owner for owner, name in engines.items()},
            engines,
        )
        for one in line.processes:
            ring._learn(one)
        for begins in ring.begins.values():
            begins.sort()
        for one in line.processes:
            if one.kind == "trainer":
                ring._learn_waits(one)
        return ring

    def _learn(self, process: Process) -> None:
        if process.kind not in ("rollout", "reward"):
            return
        for span in process.spans:
            if span.track != "groups" or "group" not in span.facts:
                continue
            group, when = str(span.facts["group"]), (span.begin_ns, span.end_ns)
            life = self.lives.get(group, _Life())
            if process.kind == "rollout":
                life = _Life(process.name, when, life.graded_by, life.grading)
            else:
                life = _Life(life.sampled_by, life.sampling, process.name, when)
            self.lives[group] = life
            self.begins.setdefault(process.name, []).append((span.begin_ns, group))

    def _learn_waits(self, trainer: Process) -> None:
        """Each wait of the trainer was ended by the last of its groups."""
        for span in trainer.spans:
            if span.name == "wait":
                known = [one for one in span.facts.get("groups", ()) if one in self.lives]
                last = max(known, key=self._arrival_ns, default="")
                self.waits.append((span.begin_ns, span.end_ns, last))

    def _arrival_ns(self, group: str) -> int:
        life = self.lives[group]
        return max(end for _, end in (life.sampling or (0, 0), life.grading or (0, 0)))

    def culprit(self, name: str, active: Active, at_ns: int) -> str:
        """WORKS, NOTHING, HAND_OVER or the process that `name` waits for."""
        asked, seen = name, {name}
        while True:
            found = self._direct(asked, active, at_ns)
            if found == WORKS:
                return WORKS if asked == name else asked
            if found == NOTHING:
                return NOTHING if asked == name else HAND_OVER
            if found == HAND_OVER or found in seen or found not in self.kinds:
                return HAND_OVER
            asked = found
            seen.add(asked)

    def _direct(self, name: str, active: Active, at_ns: int) -> str:
        tracks = active.get(name, {})
        match self.kinds[name]:
            case "rank":
                return WORKS if tracks else self._first("trainer")
            case "engine":
                return WORKS if tracks else self._of_engine(self.owners[name], active, at_ns)
            case "rollout":
                return self._of_rollout(name, active, at_ns)
            case "reward":
                return WORKS if tracks else self._next_group(name, active, at_ns)
            case "evaluator":
                return self._of_evaluator(tracks, active)
        return self._of_trainer(tracks, active, at_ns)

    def _of_engine(self, owner: str, active: Active, at_ns: int) -> str:
        """What an idle engine waits for: its service, if that has anything to do by itself."""
        found = self._of_rollout(owner, active, at_ns)
        if found == WORKS:
            return owner
        return HAND_OVER if found == self.engines[owner] else found

    def _of_rollout(self, name: str, active: Active, at_ns: int) -> str:
        tracks = active.get(name, {})
        if "stage" in tracks.get("updates", ()):
            return WORKS
        if tracks.keys() - {"held"}:
            return self.engines.get(name, WORKS)
        if tracks:  # it keeps a version for an evaluation, which asks nothing of it
            return self._first("evaluator")
        return self._next_group(name, active, at_ns)

    def _of_evaluator(self, tracks: Mapping[str, Counter[str]], active: Active) -> str:
        asks = tracks.get("problems", Counter())
        if "sample" in asks:
            return self._serving("rollout", active)
        if "grade" in asks:
            return self._serving("reward", active)
        return WORKS if tracks else NOTHING

    def _of_trainer(self, tracks: Mapping[str, Counter[str]], active: Active, at_ns: int) -> str:
        parts = tracks.get("step", Counter())
        if ASKS_RANKS & parts.keys():
            return self._first("rank")
        if "wait" in parts:
            return self._awaited(at_ns, active)
        if "publish" in parts:
            for track in tracks:
                server = track.removeprefix("update ")
                if server != track and server in self.kinds:
                    return server
        return WORKS

    def _awaited(self, at_ns: int, active: Active) -> str:
        """Where the group is that ends the trainer's wait."""
        last = next((last for begin, end, last in self.waits if begin <= at_ns < end), "")
        if not last:  # it began before anything was recorded
            graders = [name for name, kind in self.kinds.items() if kind == "reward"]
            busy = next((name for name in graders if active.get(name, {}).get("groups")), None)
            return busy or self._serving("rollout", active)
        return self._place(last, at_ns)

    def _place(self, group: str, at_ns: int) -> str:
        """Who holds a group that is on its way to the trainer."""
        life = self.lives[group]
        if life.sampling is not None and at_ns < life.sampling[1]:
            return life.sampled_by
        if life.grading is not None and at_ns < life.grading[1]:
            return life.graded_by
        return HAND_OVER

    def _next_group(self, name: str, active: Active, at_ns: int) -> str:
        """Who holds what `name` takes up next: for a sampler the trainer, which draws it."""
        if self.kinds[name] == "rollout":
            return self._first("trainer")
        begins = self.begins.get(name, [])
        at = bisect_right(begins, at_ns, key=lambda one: one[0])
        if at == len(begins):
            return self._serving("rollout", active)
        life = self.lives[begins[at][1]]
        if life.sampling is None or at_ns >= life.sampling[1]:
            return HAND_OVER
        return life.sampled_by

    def _serving(self, kind: str, active: Active) -> str:
        """One of that kind that answers requests, or else any that works."""
        names = [name for name, found in self.kinds.items() if found == kind]
        asked = [name for name in names if active.get(name, {}).get("requests")]
        busy = [name for name in names if active.get(name)]
        return next(iter(asked or busy or names), HAND_OVER)

    def _first(self, kind: str) -> str:
        return next((name for name, found in self.kinds.items() if found == kind), HAND_OVER)


def _instants(line: Timeline) -> Iterator[tuple[int, int, Active]]:
    """Stretches of the window in which nobody begins or ends anything, and what is under way."""
    changes: list[tuple[int, int, str, Span]] = []
    for process in line.processes:
        for span in process.spans:
            begin_ns = max(span.begin_ns, line.begin_ns)
            end_ns = min(span.end_ns, line.end_ns)
            if end_ns > begin_ns:
                changes.append((begin_ns, 1, process.name, span))
                changes.append((end_ns, -1, process.name, span))
    changes.sort(key=lambda one: one[:2])
    active: dict[str, dict[str, Counter[str]]] = {}
    at_ns = line.begin_ns
    for when_ns, step, name, span in changes:
        if when_ns > at_ns:
            yield at_ns, when_ns, active
            at_ns = when_ns
        _count(active, name, span, step)
    if line.end_ns > at_ns:
        yield at_ns, line.end_ns, active


def _count(active: dict[str, dict[str, Counter[str]]], name: str, span: Span, step: int) -> None:
    """Tracks and processes without a span under way have no entry."""
    tracks = active.setdefault(name, {})
    names = tracks.setdefault(span.track, Counter())
    names[span.name] += step
    if not names[span.name]:
        del names[span.name]
    if not names:
        del tracks[span.track]
    if not tracks:
        del active[name]
