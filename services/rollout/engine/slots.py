"""What each running completion is at: one row of arrays per slot, so that a step is vectorised.

A completion's tokens are its prompt and what was sampled. Its state covers `computed` of them; it
may decode once all but the last are computed, since the last is the next step's input.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.sampling import Draws, sample_key, uniforms
from shared.messages import FinishReason


@dataclass(slots=True)
class Group:
    """One request in progress. `waiting` samples have no slot."""

    request: GroupRequest
    waiting: deque[int]
    finished: dict[int, Completion] = field(default_factory=dict)
    running: int = 0

    @property
    def is_done(self) -> bool:
        """Or has enough complete samples; what still runs is then ended."""
        samples = self.request.samples
        return len(self.finished) >= min(self.request.enough or len(samples), len(samples))

    @property
    def prompt(self) -> np.ndarray:
        return self.request.prompt_token_ids


class SlotTable:
    """`num_slots` rows and one that no completion gets; `max_tokens` bounds prompt and response
    together."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.free = list(range(num_slots - 1, -1, -1))
        rows = num_slots + 1
        self.group: list[Group | None] = [None] * rows
        self.index = np.zeros(rows, np.int64)
        self.tokens = np.zeros((rows, max_tokens), np.int32)
        self.logprobs = np.zeros((rows, max_tokens), np.float32)  # at the token's position
        self.num_prompt = np.zeros(rows, np.int64)
        self.num_tokens = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)  # num_tokens at which it ends
        self.computed = np.zeros(rows, np.int64)
        self.is_running = np.zeros(rows, bool)
        self._key = np.zeros(rows, np.uint64)
        self._temperature = np.ones(rows, np.float32)
        self._top_p = np.ones(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._min_p = np.zeros(rows, np.float32)
        self._stops = np.full((rows, 1), -1, np.int64)
        self._spans: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        self._span_start = np.zeros(rows, np.int64)  # num_tokens when the version came

    @property
    def num_running(self) -> int:
        return int(self.is_running.sum())

    def occupy(self, group: Group, index: int) -> int:
        """Give a waiting sample a slot, with what it has sampled before; nothing is computed."""
        slot = self.free.pop()
        request, sampling = group.request, group.request.sampling
        num_prompt = len(group.prompt)
        self.group[slot], self.index[slot] = group, index
        self.tokens[slot, :num_prompt] = group.prompt
        self.num_prompt[slot] = self.num_tokens[slot] = num_prompt
        self.limit[slot] = min(num_prompt + sampling.max_response_tokens, self.max_tokens)
        self.computed[slot] = 0
        self._key[slot] = sample_key(request.seed, request.prompt_index, index)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot], self._top_k[slot] = sampling.top_p, sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._set_stops(slot, sampling.stop_token_ids)
        self._spans[slot] = []
        if partial := request.partial.get(index):
            self._continue(slot, partial)
        self._span_start[slot] = self.num_tokens[slot]
        self.is_running[slot] = True
        group.running += 1
        return slot

    def release(self, slot: int) -> None:
        group = self.group[slot]
        assert group is not None
        group.running -= 1
        self.group[slot] = None
        self.is_running[slot] = False
        self.free.append(slot)

    def is_fresh(self, slot: int) -> bool:
        """Whether nothing has been sampled yet."""
        return bool(self.num_tokens[slot] == self.num_prompt[slot])

    def draws(self, slots: np.ndarray) -> Draws:
        """How the next token of each slot is sampled."""
        return Draws(
            self._temperature[slots],
            self._top_p[slots],
            self._top_k[slots],
            self._min_p[slots],
            uniforms(self._key[slots], self.num_tokens[slots] - self.num_prompt[slots]),
        )

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Record sampled tokens; returns the slots that ended with them."""
        at = self.num_tokens[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.num_tokens[slots] = at + 1
        stopped = (tokens[:, None] == self._stops[slots]).any(1)
        return slots[stopped | (at + 1 >= self.limit[slots])]

    def completion(self, slot: int, version: int, reason: FinishReason | None = None) -> Completion:
        """What a slot has sampled so far; without a `reason` it came to its own end."""
        first, end = int(self.num_prompt[slot]), int(self.num_tokens[slot])
        tokens = self.tokens[slot, first:end].copy()
        if reason is None:
            reason = "stop" if end > first and tokens[-1] in self._stops[slot] else "length"
        return Completion(
            tokens, self.logprobs[slot, first:end].copy(), self._spans_until(slot, version), reason
        )

    def close_spans(self, version: int) -> None:
        """The running completions' tokens so far are of `version`; what follows is of the next."""
        for slot in self.is_running.nonzero()[0].tolist():
            self._spans[slot] = self._spans_until(slot, version)
            self._span_start[slot] = self.num_tokens[slot]

    def _continue(self, slot: int, partial: Completion) -> None:
        first = int(self.num_prompt[slot])
        end = first + len(partial.token_ids)
        self.tokens[slot, first:end] = partial.token_ids
        self.logprobs[slot, first:end] = partial.logprobs
        self.num_tokens[slot] = end
        self._spans[slot] = list(partial.version_spans)

    def _set_stops(self, slot: int, stops: list[int]) -> None:
        missing = len(stops) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def _spans_until(self, slot: int, version: int) -> list[tuple[int, int]]:
        spans = list(self._spans[slot])
        if (num := int(self.num_tokens[slot] - self._span_start[slot])) > 0:
            if spans and spans[-1][0] == version:
                num += spans.pop()[1]
            spans.append((version, num))
        return spans
