"""Draws prompts into free slots, and asks again for groups that got lost.

free slot ──> draw ──> books (open) ──> prompts stream
                         └── open, but in no stream ──> prompts stream, under the same id
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Set

import structlog
from redis.asyncio import Redis

from services.trainer.admission import Admission, Progress
from services.trainer.books import Books
from services.trainer.entries import Draw, Group
from services.trainer.events import EventMaker
from services.trainer.prompts import NoPromptFits, PromptSource, TooLong, group_id
from shared import topology
from shared.messages import PromptGroup
from shared.ranked import publish_ranked

log = structlog.get_logger()


class Feeder:
    def __init__(
        self,
        redis: Redis,
        *,
        books: Books,
        source: PromptSource,
        admission: Admission,
        progress: Progress,
        events: EventMaker,
    ) -> None:
        self._redis = redis
        self._books = books
        self._source = source
        self._admission = admission
        self._progress = progress
        self._events = events
        self._stream = topology.prompts(source.job_id)
        # Of open groups, those that came and wait for their step or are in it; the collector knows.
        self.held_ids: Callable[[], Set[str]] = frozenset
        # Held while groups are on their way to the stream or out of it, and while books and
        # progress tell of different steps.
        self.quiet = asyncio.Lock()
        self._entry_ids: dict[str, bytes] = {}  # of prompts that this process published

    async def fill(self, *, next_wave: bool = False) -> int:
        """Draw a prompt for every free slot; how many groups were opened.

        Of a job that asks in waves, a step's second one and later ones are drawn with `next_wave`.
        """
        async with self.quiet:
            groups = self._draw_for_free_slots(next_wave)
            await self._publish(groups)
        return len(groups)

    async def feed_again(self, lost: Iterable[Group]) -> None:
        """Publish open groups once more, exactly as they were drawn."""
        async with self.quiet:
            groups = []
            for entry in lost:
                group = self._source.drawn(entry.draw, min_policy_version=entry.min_policy_version)
                self._books.note_fed_again(entry.group_id)
                log.info("group_fed_again", group_id=entry.group_id, times_fed=entry.times_fed + 1)
                groups.append(group)
            await self._publish(groups)

    async def withdraw(self, group_ids: Iterable[str]) -> None:
        """Take prompts that nobody needs any more out of the stream, as far as we know them.

        Not while others are on their way: whom they overtake gets another entry.
        """
        async with self.quiet:
            ids = [self._entry_ids.pop(name) for name in group_ids if name in self._entry_ids]
            if not ids:
                return
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(self._stream, topology.SAMPLERS, *ids)
                pipe.xdel(self._stream, *ids)
                await pipe.execute()

    def forget(self, group_ids: Iterable[str]) -> None:
        """Their prompts were answered; there is nothing left to withdraw."""
        for name in group_ids:
            self._entry_ids.pop(name, None)

    def _draw_for_free_slots(self, next_wave: bool) -> list[PromptGroup]:
        num_open = self._books.num_open()
        num_free = min(
            self._admission.max_open(self._progress) - num_open,
            self._admission.max_drawn_per_step() - num_open - self._num_dropped_meanwhile(),
        )
        if num_free <= 0:
            return []  # as most often: the line is long, and need not be read then
        out, num_held = self._line()
        if self._source.job.asks_in_waves and (
            out
            or num_held >= self._admission.groups_per_step  # they are the step, or in it already
            or (self._num_dropped_meanwhile() and not next_wave)
        ):
            return []  # what is drawn must not depend on who comes first
        draw = self._books.next_draw()
        draws: list[Draw] = []
        groups: list[PromptGroup] = []
        skipped_in_a_row = 0
        while len(groups) < num_free:
            if skipped_in_a_row == 2 * len(self._source.rows):  # a whole epoch, wherever we began
                raise NoPromptFits(
                    f"none of the {len(self._source.rows)} prompts fits into "
                    f"{self._source.max_prompt_tokens} tokens (sampling.context_length "
                    f"less sampling.max_response_tokens)"
                )
            version = self._admission.min_policy_version(num_held, out, self._progress)
            if version > self._progress.published_version:
                break  # nobody could sample it yet; asked again once that is published
            drawn = self._source.group(draw, min_policy_version=version)
            draws.append(self._entry(draw, version, drawn))
            skipped_in_a_row += 1
            if isinstance(drawn, PromptGroup):
                groups.append(drawn)
                out[version] += 1
                skipped_in_a_row = 0
            draw += 1
        if draws:
            self._books.record_draws(draws)
        return groups

    def _line(self) -> tuple[Counter[int], int]:
        """Open groups that are out, by the oldest version that may sample each; and how many are
        here."""
        oldest, held = self._books.oldest_versions(), self.held_ids()
        out = Counter(version for name, version in oldest.items() if name not in held)
        return out, len(oldest) - out.total()

    def _num_dropped_meanwhile(self) -> int:
        """Groups that came for the step being collected and could not be used."""
        return self._books.num_unusable_during(self._progress.step + 1)

    def _entry(self, draw: int, version: int, drawn: PromptGroup | TooLong) -> Draw:
        name = group_id(self._source.job_id, draw)
        if isinstance(drawn, PromptGroup):
            return Draw(draw, name, version)
        event = self._events(
            "prompt_skipped",
            row=drawn.row,
            source=drawn.source,
            tokens=drawn.num_tokens,
            limit=drawn.limit,
        )
        return Draw(draw, name, version, "too_long", event)

    async def _publish(self, groups: list[PromptGroup]) -> None:
        if not groups:
            return
        ids, moved = await publish_ranked(
            self._redis,
            self._stream,
            [(rank(group), group.pack()) for group in groups],
            group=topology.SAMPLERS,
        )
        for name, entry_id in self._entry_ids.items():
            self._entry_ids[name] = moved.get(entry_id, entry_id)
        self._entry_ids |= zip((group.group_id for group in groups), ids, strict=True)


def rank(group: PromptGroup) -> str:
    """Whose turn is earlier goes first, and of those the longest prompt: what takes longest must
    not begin last. `min_policy_version` tells the turn."""
    shortness = 10**12 - len(group.prompt_token_ids)
    return f"{group.min_policy_version:012d} {shortness:012d} {group.draw:012d}"
