"""Continuous batching over groups: one prompt is computed once, its samples run as slots allow.

    add ──> waiting ──prefix slot free──> prefix computed ──slot free──> running ──> finished
                                          (chunk by chunk)  state copied    ^ |
                                          update: computed anew ────────────┘ └─ update: likewise

One `step` does a bounded amount of each: a batch of prompt chunks, the starts that slots allow, one
token of every running completion. Nothing here depends on which completions run together.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.rollout.engine.checks import (
    check_no_penalties,
    check_request,
    check_routes,
    check_tokens,
)
from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.routes import Recording, RouteTable
from services.rollout.engine.sampling import Draws, sample
from services.rollout.engine.scoring import Scorer
from services.rollout.engine.slots import Group, SlotTable
from services.rollout.engine.weights import LoadedVersion
from services.rollout.models.deepseek_v4 import Choices, Sampler
from services.rollout.models.deepseek_v4_cache import Cache, Run
from shared.errors import Retryable
from shared.messages import FinishReason
from shared.weights.protocol import PauseMode

_PROBED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of one engine. A longer sequence is refused, a wider batch waits."""

    max_running: int
    max_tokens: int  # prompt and response of one completion
    chunk_tokens: int = 256  # of one prompt, computed at once
    batch_tokens: int = 2048  # of all prompts, computed at once

    @property
    def num_prefixes(self) -> int:
        """Prompts that are computed and wait for slots for their samples."""
        return min(self.max_running, 16)


@dataclass(slots=True)
class _Prefix:
    """A group's prompt in a slot of its own, to be copied into its samples' slots."""

    group: Group
    slot: int  # of the cache
    computed: int = 0
    logits: Tensor | None = None  # [1, V] after the last prompt token


class Scheduler:
    """Owns the cache. Not thread-safe: one plain loop calls it."""

    def __init__(
        self,
        model: Sampler,
        *,
        limits: Limits,
        recording: Recording = Recording(),  # noqa: B008  a frozen value
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.limits = limits
        self.version: LoadedVersion | None = None
        self.tokens_sampled = 0
        self.model = model
        self._slots = SlotTable(limits.max_running, limits.max_tokens)
        # One more row than completions can have: the witness of updates.
        first, count = limits.max_running + 1, limits.num_prefixes
        self._free_prefixes = list(range(first, first + count))
        self._recording = recording
        self._routes = RouteTable(
            model.arch, recording, num_rows=first + count, max_tokens=limits.max_tokens
        )
        self._cache = Cache(
            model.arch,
            num_slots=first + 2 * count,
            max_tokens=limits.max_tokens,
            dtype=dtype,
            device=device,
        )
        self._scorer = Scorer(
            model,
            self._cache,
            slots=range(first + count, first + 2 * count),
            chunk_tokens=limits.chunk_tokens,
        )
        self._dtype = dtype
        self._device = device
        self._waiting: deque[Group] = deque()
        self._prefixes: list[_Prefix] = []
        self._groups: dict[str, Group] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._groups) and self.version is not None

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        """Completions that have no slot yet."""
        return sum(len(group.waiting) for group in self._groups.values())

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def add(self, request: GroupRequest) -> None:
        """Queue a request. ValueError names what is out of bounds."""
        check_request(request, self.model.arch, self.limits.max_tokens)
        check_no_penalties(request.sampling)
        if self._recording.on and request.with_routes:
            check_routes(request)
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is running already")
        if request.policy_version is not None:
            self.require(request.policy_version)
        group = Group(request, deque(request.samples))
        self._groups[request.request_id] = group
        self._waiting.append(group)

    def require(self, policy_version: int) -> LoadedVersion:
        """The loaded version, which must be this one."""
        if self.version is None:
            raise Retryable(f"policy version {policy_version} is not held; no weights are loaded")
        if self.version.policy_version != policy_version:
            held = self.version.policy_version
            raise Retryable(f"policy version {policy_version} is not held; version {held} is")
        return self.version

    def abort(self, request_id: str) -> list[Completion] | None:
        """End a request now; what it has sampled so far, or None if it is not there."""
        group = self._groups.get(request_id)
        return None if group is None else self._end(group)

    def abort_all(self) -> Iterator[tuple[str, list[Completion]]]:
        for request_id, group in list(self._groups.items()):
            yield request_id, self._end(group)

    def step(self) -> list[tuple[str, list[Completion]]]:
        """One round; the requests that ended with it."""
        self._admit_prefixes()
        self._compute_chunks()
        done = self._start_samples()
        done += self._decode()
        return [(group.request.request_id, _in_order(group)) for group in done]

    def switch(self, version: LoadedVersion, mode: PauseMode) -> list[tuple[str, list[Completion]]]:
        """Serve another version from here on; what `abort` mode ends is returned.

        State of the old weights is dropped: prompts and running completions are computed anew.
        """
        ended: list[tuple[str, list[Completion]]] = []
        if self.version is not None:
            self._slots.close_spans(self.version.policy_version)
            if mode == "abort":
                running = [g for g in self._groups.values() if g.running]
                ended = [(group.request.request_id, self._end(group)) for group in running]
            elif mode == "retract":
                self._retract_all()
        self.version = version
        self._drop_state()
        return ended

    @property
    def has_state(self) -> bool:
        """Whether anything that was computed is still taken for computed."""
        kept = any(prefix.computed or prefix.logits is not None for prefix in self._prefixes)
        return kept or bool(self._slots.computed.any())

    def score_witness(self, token_ids: np.ndarray, *, until: int) -> np.ndarray:
        """FP32 log-probabilities of tokens ..`until`, on top of whatever state its slot has.

        The slot is a row of the running completions' table and of the cache as theirs are, so that
        a switch which does not drop their state does not drop the witness's.
        """
        assert self.version is not None
        slot, table = self.limits.max_running, self._slots
        start = int(table.computed[slot])
        run = Run(slot, start, token_ids[start:until])
        scores = self._scorer.score_runs(
            [run], token_ids[start + 1 : until + 1], 1.0, version=self.version
        )
        table.computed[slot] = until
        return scores

    def forget_witness(self) -> None:
        """Its slot is no completion's, and holds nothing from here on."""
        self._slots.computed[self.limits.max_running] = 0

    @property
    def is_recomputing(self) -> bool:
        """Whether running completions still lack state under the weights that are served."""
        table = self._slots
        return bool((table.is_running & (table.computed < table.num_tokens - 1)).any())

    def prober(self) -> "Scheduler":
        """One to score with in another thread: same model and bounds, a small cache of its own."""
        limits = replace(self.limits, max_running=_PROBED_AT_ONCE)
        return Scheduler(self.model, limits=limits, dtype=self._dtype, device=self._device)

    def score(
        self, sequences: list[np.ndarray], temperature: float, *, version: LoadedVersion
    ) -> list[np.ndarray]:
        """FP32 log-probabilities of tokens 1.. of each sequence, by the prefill path."""
        for number, sequence in enumerate(sequences):
            check_tokens(sequence, self.model.arch, self.limits.max_tokens, f"sequence {number}")
        return self._scorer.score(sequences, temperature, version=version)

    # ---------------------------------------------------------------- one round

    def _admit_prefixes(self) -> None:
        while self._waiting and self._free_prefixes:
            self._prefixes.append(_Prefix(self._waiting.popleft(), self._free_prefixes.pop()))

    def _compute_chunks(self) -> None:
        """The next chunk of prompts and of completions whose state was dropped, up to a budget."""
        limits, table = self.limits, self._slots
        budget = limits.batch_tokens
        runs: list[Run] = []
        prefixes: list[_Prefix] = []
        for slot in (table.is_running & (table.computed < table.num_tokens - 1)).nonzero()[0]:
            start, end = int(table.computed[slot]), int(table.num_tokens[slot] - 1)
            end = min(end, start + limits.chunk_tokens)
            if (budget := budget - (end - start)) < 0 and runs:
                break
            runs.append(Run(int(slot), start, table.tokens[slot, start:end]))
            table.computed[slot] = end
        for prefix in self._prefixes:
            prompt = prefix.group.prompt
            if prefix.logits is not None:
                continue
            end = min(len(prompt), prefix.computed + limits.chunk_tokens)
            if (budget := budget - (end - prefix.computed)) < 0 and runs:
                break
            runs.append(Run(prefix.slot, prefix.computed, prompt[prefix.computed : end]))
            prefix.computed = end
            prefixes.append(prefix)
        if runs:
            self._prefill(runs, prefixes)

    def _prefill(self, runs: list[Run], prefixes: list[_Prefix]) -> None:
        """The last runs are those of `prefixes`."""
        weights, choices = self._weights, self._new_choices()
        step = self._cache.prefill_step(runs)
        hidden = self.model.hidden(weights, self._cache, step, choices=choices)
        sizes = np.array([len(run.token_ids) for run in runs])
        prompts = len(runs) - len(prefixes)
        if choices is not None and prefixes:
            self._routes.put_runs(runs[prompts:], choices, first=int(sizes[:prompts].sum()))
        ends = sizes.cumsum()[prompts:]
        complete = [
            (prefix, end - 1)
            for prefix, end in zip(prefixes, ends, strict=True)
            if prefix.computed == len(prefix.group.prompt)
        ]
        if complete:
            rows = torch.tensor([int(row) for _, row in complete], device=self._device)
            logits = self.model.logits(weights, hidden.index_select(0, rows))
            for (prefix, _), row in zip(complete, logits.split(1), strict=True):
                prefix.logits = row

    def _start_samples(self) -> list[Group]:
        """Copy computed prompts into free slots and sample first tokens."""
        started: list[tuple[_Prefix, int]] = []
        for prefix in [p for p in self._prefixes if p.logits is not None]:
            waiting = prefix.group.waiting
            while waiting and self._slots.free:
                slot = self._slots.occupy(prefix.group, index := waiting.popleft())
                self._slots.computed[slot] = len(prefix.group.prompt)
                self._begin_routes(prefix, slot, index)
                started.append((prefix, slot))
            if not waiting:
                self._drop_prefix(prefix)
        if not started:
            return []
        self._cache.copy([prefix.slot for prefix, _ in started], [slot for _, slot in started])
        # One that was interrupted goes on from its last token, not from the prompt.
        fresh = [(p, slot) for p, slot in started if self._slots.is_fresh(slot)]
        if not fresh:
            return []
        slots = np.array([slot for _, slot in fresh])
        logits = torch.cat([prefix.logits for prefix, _ in fresh if prefix.logits is not None])
        return self._sample(slots, logits, self._slots.draws(slots))

    def _decode(self) -> list[Group]:
        table = self._slots
        ready = table.is_running & (table.computed == table.num_tokens - 1)
        slots = ready.nonzero()[0]
        if not len(slots):
            return []
        positions = table.num_tokens[slots] - 1
        inputs = table.tokens[slots, positions].astype(np.int64)
        step = self._cache.decode_step(slots, positions, inputs)
        choices = self._new_choices()
        hidden = self.model.hidden(self._weights, self._cache, step, choices=choices)
        if choices is not None:
            self._routes.put(slots, positions, choices)
        logits = self.model.logits(self._weights, hidden)[: len(slots)]
        table.computed[slots] += 1
        return self._sample(slots, logits, table.draws(slots))

    def _sample(self, slots: np.ndarray, logits: Tensor, draws: Draws) -> list[Group]:
        tokens, logprobs = sample(logits, draws)
        self.tokens_sampled += len(slots)
        ended = self._slots.append(slots, tokens, logprobs)
        touched = {group.request.request_id: group for group in map(self._finish, ended.tolist())}
        done = [group for group in touched.values() if group.is_done]
        for group in done:
            self._end(group)
        return done

    # ---------------------------------------------------------------- endings

    def _finish(self, slot: int, reason: FinishReason | None = None) -> Group:
        group = self._slots.group[slot]
        assert group is not None
        index = int(self._slots.index[slot])
        group.finished[index] = self._completion(slot, group, reason)
        self._slots.release(slot)
        return group

    def _completion(self, slot: int, group: Group, reason: FinishReason | None) -> Completion:
        assert self.version is not None
        completion = self._slots.completion(slot, self.version.policy_version, reason)
        if not (group.request.with_routes and self._recording.on) or self._slots.is_fresh(slot):
            return completion
        num_inputs = int(self._slots.num_tokens[slot]) - 1
        return replace(completion, routes=self._routes.take(slot, num_inputs))

    def _end(self, group: Group) -> list[Completion]:
        """Take a group out of the engine, its completions as far as they are."""
        for slot, holder in enumerate(self._slots.group):
            if holder is group:
                self._finish(slot, "abort")
        for index in group.waiting:
            none = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")
            group.finished[index] = group.request.partial.get(index, none)
        group.waiting.clear()
        for prefix in [p for p in self._prefixes if p.group is group]:
            self._drop_prefix(prefix)
        if group in self._waiting:
            self._waiting.remove(group)
        del self._groups[group.request.request_id]
        return _in_order(group)

    def _drop_state(self) -> None:
        self._slots.computed[:] = 0
        for prefix in self._prefixes:
            prefix.computed, prefix.logits = 0, None

    def _retract_all(self) -> None:
        """Running completions give up their slots and go back to the head of the queue."""
        for slot in self._slots.is_running.nonzero()[0][::-1]:
            group = self._slots.group[slot]
            assert group is not None
            index = int(self._slots.index[slot])
            group.request.partial[index] = self._completion(int(slot), group, "abort")
            self._slots.release(int(slot))
            group.waiting.appendleft(index)
            if group not in self._waiting and not any(p.group is group for p in self._prefixes):
                self._waiting.appendleft(group)

    def _new_choices(self) -> Choices | None:
        return Choices() if self._recording.on else None

    def _begin_routes(self, prefix: _Prefix, slot: int, index: int) -> None:
        """Those of the prompt, or what an interrupted completion has brought along."""
        if not self._recording.on:
            return
        if self._slots.is_fresh(slot):
            self._routes.copy(prefix.slot, slot, len(prefix.group.prompt))
        elif (routes := prefix.group.request.partial[index].routes) is not None:
            self._routes.give(slot, routes)

    def _drop_prefix(self, prefix: _Prefix) -> None:
        self._prefixes.remove(prefix)
        self._free_prefixes.append(prefix.slot)

    @property
    def _weights(self):  # type: ignore[no-untyped-def]
        assert self.version is not None
        return self.version.derived


def _in_order(group: Group) -> list[Completion]:
    return [group.finished[index] for index in group.request.samples]
