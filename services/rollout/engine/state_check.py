"""That a switch drops what the old weights have computed: looked at in every update.

A witness, the beginning of a probe's sequence, is computed under the old weights in a slot like any
completion's. After the switch nothing may be taken for computed, and the witness must score as the
candidate scored it where nothing else had been; else the old version is put back, and computes its
state anew.
"""

import numpy as np

from services.rollout.engine.probing import Proven
from services.rollout.engine.requests import Completion
from services.rollout.engine.scheduler import Scheduler
from shared.errors import WeightsCorrupt

WITNESS_TOKENS = 32  # its state is computed twice in the pause
SAME = 1e-3  # |delta log p| of the median token, between two ways to the same FP32 scores


class PrefixKept(WeightsCorrupt):
    """State of older weights would be used. `ended` are requests that the switch has ended."""

    def __init__(self, reason: str, ended: list[tuple[str, list[Completion]]]) -> None:
        super().__init__(reason)
        self.ended = ended


class StateCheck:
    """Made before the switch, asked after it."""

    def __init__(self, scheduler: Scheduler, proven: Proven | None) -> None:
        self._scheduler = scheduler
        self._old = scheduler.version
        self._tokens = np.zeros(0, np.int32)
        if proven is not None:
            token_ids = proven.probe.sequences[0].token_ids[:WITNESS_TOKENS]
            self._tokens = np.array(token_ids, np.int32)
            self._expected = proven.scores[0][: len(token_ids) - 1]
        if self._old is not None and len(self._tokens):
            scheduler.score_witness(self._tokens, until=len(self._tokens) // 2)

    def after_switch(self, ended: list[tuple[str, list[Completion]]]) -> None:
        """`PrefixKept`, with the old version serving again, unless all old state is gone."""
        reason = self._found()
        self._scheduler.forget_witness()
        if reason is None:
            return
        if self._old is not None:
            self._scheduler.switch(self._old, "in_place")
        raise PrefixKept(reason, ended)

    def _found(self) -> str | None:
        if self._scheduler.has_state:
            old = None if self._old is None else self._old.policy_version
            return f"state that version {old} has computed was kept over the switch"
        if self._old is None or not len(self._tokens):
            return None
        try:
            scores = self._scheduler.score_witness(self._tokens, until=len(self._tokens) - 1)
        except Exception as err:  # noqa: BLE001  as out of memory: the old version is put back
            return f"a prompt that was cached before the switch cannot be scored: {err!r}"
        delta = float(np.median(np.abs(scores - self._expected)))
        if delta <= SAME:
            return None
        return f"a prompt that was cached before the switch is scored {delta:.3g} off by the median"
