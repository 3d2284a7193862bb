"""What was sampled is computed again to the bit, whatever updates came under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.rollout.engine.embedded import EmbeddedEngine
from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.resampling import Resampler
from services.rollout.engine.weights import LoadedVersion, build_version
from shared.messages import SamplingParams
from shared.weights.protocol import PauseMode
from tests.parity.engines import stored
from tests.tiny_deepseek_v4 import DEMO, random_weights

ARCH = DEMO.with_format("fp8")
SAMPLING = SamplingParams(max_response_tokens=30, temperature=0.8)
SWITCH_AT = {9: 1, 22: 2}  # steps of the scheduler


@pytest.fixture(scope="module")
def versions() -> list[LoadedVersion]:
    return [
        build_version(v, ARCH, stored(ARCH, random_weights(ARCH, seed=11 + v, spread=0.5)))
        for v in range(3)
    ]


@dataclass
class Sampling:
    """Groups of three on four slots, so that some wait; versions change under way."""

    engine: EmbeddedEngine
    versions: Sequence[LoadedVersion]
    prompts: Sequence[np.ndarray]
    done: list[tuple[np.ndarray, Completion]] = field(default_factory=list)

    def run(self, mode: PauseMode) -> None:
        scheduler, step = self.engine.scheduler, 0
        scheduler.switch(self.versions[0], "in_place")
        for number in range(len(self.prompts)):
            self.add(number, list(range(3)))
        while scheduler.has_work:
            self.keep(scheduler.step())
            step += 1
            if step in SWITCH_AT:
                self.keep(scheduler.switch(self.versions[SWITCH_AT[step]], mode))

    def keep(self, ended: Sequence[tuple[str, list[Completion]]]) -> None:
        """What an update cut short goes on, as a server has it go on."""
        for name, completions in ended:
            cut = {i: one for i, one in enumerate(completions) if one.finish_reason == "abort"}
            prompt = self.prompts[int(name)]
            self.done += [(prompt, one) for i, one in enumerate(completions) if i not in cut]
            if cut:
                self.add(int(name), list(cut), partial=cut)

    def add(self, number: int, samples: list[int], **more: dict[int, Completion]) -> None:
        request = GroupRequest(
            *(str(number), self.prompts[number], samples, SAMPLING),
            seed=number,
            prompt_index=number,
            **more,
        )
        self.engine.scheduler.add(request)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_every_log_probability_comes_out_again(
    mode: PauseMode, versions: list[LoadedVersion]
) -> None:
    """One prompt has two chunks; two updates come under way."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, ARCH.vocab_size, n).astype(np.int32) for n in (12, 270)]
    sampling = Sampling(EmbeddedEngine(EngineSpec(ARCH, 4, 320, True, 1)), versions, prompts)
    sampling.run(mode)
    scheduler = sampling.engine.scheduler
    chunk = scheduler.limits.chunk_tokens
    resampler = Resampler(scheduler.model, max_tokens=320, chunk_tokens=chunk)
    for prompt, one in sampling.done:
        again = resampler.score(
            np.concatenate([prompt, one.token_ids]),
            one.version_spans,
            temperature=SAMPLING.temperature,
            load=versions.__getitem__,
            pause_mode=mode,
        )
        np.testing.assert_array_equal(again, one.logprobs)
    assert len(sampling.done) == 6
    assert max(len(one.version_spans) for _, one in sampling.done) > 1
