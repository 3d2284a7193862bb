"""From what is asked to outcomes: pool and remote graders, weighted sums, repetitions.

    Asked ──> its grader and further parts ──pool────┬──> one outcome each ──> weighted sum
                                           └─remote──┘
A sum exists only if every part is a score: the first that is not is the outcome. The penalty for
length is arithmetic and needs no process.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.reward.graders.grader import HEAVY
from services.reward.length import overlong_penalty
from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from services.reward.remote import RemoteConfig, RemoteGrader
from shared.job_reward import PLUG_IN, REMOTE, OverlongSection, RewardPart
from shared.messages import GraderError, Outcome, Score, score_fault
from shared.telemetry import counter

MAX_REASON = 300
REPEATED = counter("reward_checks_repeated_total", "Checks repeated after a time-out or an error")


@dataclass(frozen=True, slots=True)
class Asked:
    """One response and how it is judged; `num_tokens` is needed by the penalty for length."""

    grader: str
    response: str
    gold: str
    timeout_s: float
    parts: tuple[RewardPart, ...] = ()
    overlong: OverlongSection | None = None
    num_tokens: int = 0


class Grading:
    """Built with a running pool; `close` ends what it opened itself."""

    def __init__(self, pool: GradingPool, remotes: Mapping[str, RemoteConfig]) -> None:
        self.pool = pool
        self._remotes = {name: RemoteGrader(name, config) for name, config in remotes.items()}

    @property
    def names(self) -> list[str]:
        """As a job or a request writes them."""
        return sorted(
            [*self.pool.grader_names, *(REMOTE + name for name in self._remotes)], key=str.lower
        )

    def unknown(self, asked: Asked) -> str | None:
        """The first grader of it that does not exist."""
        known = set(self.names)
        graders = (asked.grader, *(part.grader for part in asked.parts))
        return next((one for one in graders if _pool_name(one) not in known), None)

    async def prepare(self, graders: Sequence[str]) -> None:
        """Have heavy graders loaded ahead of their checks."""
        if HEAVY & set(graders):
            await self.pool.prepare()

    async def grade(
        self,
        asked: Sequence[Asked],
        *,
        retries: int = 0,
        retried: Sequence[str] = ("timeout", "error"),
    ) -> list[Outcome]:
        """One outcome each, in order. What ended as `retried` is asked again, `retries` times."""
        outcomes = await self._grade(asked)
        for _ in range(retries):
            places = [i for i, one in enumerate(outcomes) if one.kind in retried]
            if not places:
                break
            REPEATED.inc(len(places))
            again = await self._grade([asked[place] for place in places])
            for place, outcome in zip(places, again, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def close(self) -> None:
        await asyncio.gather(*(remote.close() for remote in self._remotes.values()))

    async def _grade(self, asked: Sequence[Asked]) -> list[Outcome]:
        """All parts of all responses at once, then the sums."""
        single = [
            replace(one, grader=grader, parts=())
            for one in asked
            for grader in (one.grader, *(part.grader for part in one.parts))
        ]
        outcomes = iter(await self._singles(single))
        return [
            _combined(one, next(outcomes), [next(outcomes) for _ in one.parts]) for one in asked
        ]

    async def _singles(self, asked: Sequence[Asked]) -> list[Outcome]:
        places: dict[str, list[int]] = {}
        for place, one in enumerate(asked):
            remote = one.grader.removeprefix(REMOTE) if one.grader.startswith(REMOTE) else ""
            places.setdefault(remote, []).append(place)
        answers = await asyncio.gather(
            *(self._at(remote, [asked[place] for place in at]) for remote, at in places.items())
        )
        found: dict[int, Outcome] = {}
        for at, answer in zip(places.values(), answers, strict=True):
            found.update(zip(at, answer, strict=True))
        return [found[place] for place in range(len(asked))]

    async def _at(self, remote: str, asked: Sequence[Asked]) -> list[Outcome]:
        """By the pool, or by the remote grader of that name."""
        if remote:
            return await self._remotes[remote].grade([(a.response, a.gold) for a in asked])
        checks = [Check(_pool_name(a.grader), a.response, a.gold, a.timeout_s) for a in asked]
        return await self.pool.grade(checks)


def _pool_name(grader: str) -> str:
    return grader.removeprefix(PLUG_IN)


def _combined(asked: Asked, own: Outcome, parts: Sequence[Outcome]) -> Outcome:
    if not (asked.parts or asked.overlong):
        return own
    missing = next((one for one in (own, *parts) if not isinstance(one, Score)), None)
    if missing is not None:
        return missing
    assert isinstance(own, Score)
    value, reasons = own.value, [f"{asked.grader} {own.value:g} ({own.reason})"]
    for part, outcome in zip(asked.parts, parts, strict=True):
        assert isinstance(outcome, Score)
        value += part.weight * outcome.value
        reasons.append(f"{part.weight:g} x {part.grader} {outcome.value:g}")
    if (overlong := asked.overlong) is not None:
        penalty = overlong_penalty(
            asked.num_tokens,
            max_tokens=overlong.max_tokens,
            buffer_tokens=overlong.buffer_tokens,
        )
        value += overlong.weight * penalty
        reasons.append(f"{overlong.weight:g} x overlong {penalty:g}")
    reason = ", ".join(reasons)[:MAX_REASON]
    if fault := score_fault(value):
        return GraderError(reason=f"the weighted sum: {fault} ({reason})"[:MAX_REASON])
    return Score(value=value, extracted=own.extracted, reason=reason, unshaped=own.correctness)
