"""What one optimiser step changes in the published weights, and what a delta of it costs.

`python -m benchmarks.delta [--steps 20] [--rates 1e-6 1e-5 1e-4] [--out FILE] [--plot PNG]`. A job
of the demo's kind in one process: sample with the published weights, grade, one GRPO step, publish,
compare with the version before. The second table is the speed of the codec itself, in seconds of
CPU time beside a plain copy of the same bytes.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron is imported

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from services.reward.graders.arithmetic import grade
from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.scheduler import Limits, Scheduler
from services.rollout.engine.weights import build_version
from services.rollout.models.deepseek_v4 import Sampler
from services.trainer.engine.actor import Actor
from services.trainer.loss.advantages import advantages
from services.trainer.megatron import parallel
from services.trainer.models.deepseek_v4.weights import release_tensors
from shared.job import Job, load_job_file
from shared.job_algorithm import AlgorithmSection
from shared.messages import SamplingParams, Score, TrainingBatch, TrainingSample
from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.checkpoint import quantise_tensor
from shared.quant.activation import SERVED
from shared.quant.policy import POLICIES
from shared.tokenizer import CheckpointTokenizer
from shared.weights.delta import apply_delta, encode_delta

KINDS = {torch.float8_e4m3fn: "FP8", torch.bfloat16: "BF16", torch.float32: "FP32"}
SPEED_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Change:
    """Between two versions, of one kind of tensor or of all."""

    num_items: int
    num_changed: int
    full_bytes: int
    moved_bytes: int

    @property
    def share_changed(self) -> float:
        return self.num_changed / self.num_items

    @property
    def share_moved(self) -> float:
        return self.moved_bytes / self.full_bytes


class OneProcessJob:
    """The demo job without its services: `step()` trains once and returns what was published."""

    def __init__(self, job: Job, *, groups: int) -> None:
        self._job = job
        self._groups = groups
        path = Path(job.model.rollout_checkpoint)
        self._arch = Architecture.load(path)
        self._tokenizer = CheckpointTokenizer.load(path)
        self._actor = Actor(job)
        limits = Limits(
            max_running=groups * job.sampling.samples_per_prompt,
            max_tokens=job.sampling.context_length,
        )
        self._scheduler = Scheduler(Sampler(self._arch, SERVED), limits=limits)
        lines = Path(str(job.data.path)).read_text().splitlines()
        self._problems = [json.loads(line) for line in lines]
        self._step = 0

    def publish(self) -> dict[str, Tensor]:
        """The actor's weights in release formats, which the sampler serves from here on."""
        policy = POLICIES[self._arch.weight_format]
        stored: dict[str, Tensor] = {}
        for name, weight in release_tensors(self._actor.model):
            stored |= quantise_tensor(name, weight.detach().clone(), policy=policy)
        version = build_version(self._step, self._arch, stored)
        self._scheduler.switch(version, "in_place")
        return stored

    def step(self) -> float:
        """One optimiser step on fresh samples; their mean reward."""
        version, self._step = self._step, self._step + 1
        samples = list(self._samples(version))
        batch = TrainingBatch(
            job_id="delta",
            step=self._step,
            policy_version=version,
            temperature=1.0,
            samples=samples,
            group_ids=sorted({sample.group_id for sample in samples}),
        )
        self._actor.train_step(batch)
        return fmean(sample.reward for sample in samples)

    def _samples(self, version: int) -> Iterator[TrainingSample]:
        first = version * self._groups
        chosen = [self._problems[(first + i) % len(self._problems)] for i in range(self._groups)]
        prompts = [self._tokenizer.encode(problem["problem"]) for problem in chosen]
        answers = self._generate(prompts, seed=version)
        for number, (problem, prompt) in enumerate(zip(chosen, prompts, strict=True)):
            rewards = [self._reward(one, problem["answer"]) for one in answers[number]]
            lengths = [len(completion.token_ids) for completion in answers[number]]
            found = advantages(
                rewards, ["g"] * len(rewards), lengths, algorithm=AlgorithmSection(name="grpo")
            )
            for i, completion in enumerate(answers[number]):
                yield TrainingSample(
                    rollout_id=f"g{number}.{i}",
                    group_id=f"g{number}",
                    token_ids=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
                    num_prompt_tokens=len(prompt),
                    sampler_logprobs=completion.logprobs,
                    advantage=float(found[i]),
                    reward=rewards[i],
                    oldest_version=version,
                )

    def _generate(self, prompts: Sequence[list[int]], *, seed: int) -> dict[int, list[Completion]]:
        sampling = SamplingParams(
            max_response_tokens=self._job.sampling.max_response_tokens,
            stop_token_ids=list(self._tokenizer.stop_token_ids),
        )
        for number, prompt in enumerate(prompts):
            samples = list(range(self._job.sampling.samples_per_prompt))
            request = GroupRequest(
                str(number), np.array(prompt, np.int32), samples, sampling, seed, number
            )
            self._scheduler.add(request)
        done: dict[int, list[Completion]] = {}
        while self._scheduler.has_work:
            done |= {int(name): found for name, found in self._scheduler.step()}
        return done

    def _reward(self, completion: Completion, gold: str) -> float:
        outcome = grade(self._tokenizer.decode(completion.token_ids.tolist()), gold)
        return outcome.value if isinstance(outcome, Score) else 0.0


def compare(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Change]:
    """By kind of tensor and for "all"; each delta is applied and must give the new bytes."""
    items: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    full: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for name, tensor in new.items():
        width = tensor.element_size()
        base, raw = raw_bytes(old[name]), raw_bytes(tensor)
        delta = encode_delta(base, raw, item_bytes=width)
        if delta is not None and not np.array_equal(apply_delta(base, delta), raw):
            raise AssertionError(f"{name}: a delta does not give the new bytes")
        for kind in {KINDS.get(tensor.dtype, "other"), "all"}:
            items[kind] += tensor.numel()
            element = f"<u{width}"
            changed[kind] += int(np.count_nonzero(base.view(element) != raw.view(element)))
            full[kind] += len(raw)
            moved[kind] += len(raw) if delta is None else len(delta)
    return {k: Change(items[k], changed[k], full[k], moved[k]) for k in items}


def raw_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def measure_job(rate: float, given: argparse.Namespace) -> list[dict[str, Change]]:
    """What changed in each step at one learning rate."""
    document = dict(load_job_file(given.job))
    document["actor"] = {"dtype": "float32", "optimizer": {"learning_rate": rate}}
    loop = OneProcessJob(Job.model_validate(document), groups=given.groups)
    before, changes = loop.publish(), []
    for _ in range(given.steps):
        loop.step()
        after = loop.publish()
        changes.append(compare(before, after))
        before = after
    return changes


def measure_speed(share: float) -> dict[str, float]:
    """GB/s of CPU time on random codes, `share` of which are others now."""
    generator = np.random.default_rng(0)
    base = generator.integers(0, 256, SPEED_BYTES, dtype=np.uint8)
    new, out = base.copy(), np.empty_like(base)
    at = np.flatnonzero(generator.random(SPEED_BYTES, dtype=np.float32) < share)
    new[at] += generator.integers(1, 256, len(at), dtype=np.uint8)
    delta = encode_delta(base, new, item_bytes=1)
    assert delta is not None
    return {
        "share_moved": len(delta) / SPEED_BYTES,
        "copy": _speed(lambda: np.copyto(out, base)),
        "encode": _speed(lambda: encode_delta(base, new, item_bytes=1)),
        "apply": _speed(lambda: apply_delta(base, delta, out=out)),
    }


def _speed(run: Callable[[], object], *, repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        began_s = time.process_time()
        run()
        seconds.append(time.process_time() - began_s)
    return SPEED_BYTES / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="prompts of one step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG of both shares over the steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    parallel.initialise(seed=1)
    jobs = {rate: measure_job(rate, given) for rate in given.rates}
    parallel.leave()
    speed = {share: measure_speed(share) for share in (0.001, 0.01, 0.03, 0.1)}
    console = Console()
    console.print(_job_table(jobs, given.steps))
    console.print(_speed_table(speed))
    if given.plot is not None:
        _plot(jobs, given.plot)
    if given.out is not None:
        steps = {
            str(rate): [{k: asdict(c) for k, c in step.items()} for step in changes]
            for rate, changes in jobs.items()
        }
        text = json.dumps({"jobs": steps, "speed": speed}, indent=2)
        given.out.write_text(text + "\n")


def _job_table(jobs: dict[float, list[dict[str, Change]]], steps: int) -> Table:
    table = Table(title=f"mean of {steps} steps, [least, most]", box=None, title_justify="left")
    for heading in ("rate", "weights", "of bytes", "elements changed", "bytes moved"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for rate, changes in jobs.items():
        for kind in ("FP8", "BF16", "FP32", "all"):
            found = [step[kind] for step in changes]
            part = found[0].full_bytes / changes[0]["all"].full_bytes
            cells = (
                _range([c.share_changed for c in found]),
                _range([c.share_moved for c in found]),
            )
            table.add_row(f"{rate:.0e}", kind, f"{part:.1%}", *cells)
    return table


def _plot(jobs: dict[float, list[dict[str, Change]]], path: Path) -> None:
    """Left: FP8 codes that changed in a step. Right: bytes of all weights that a server pulls."""
    figure = Figure(figsize=(9, 3.6), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    codes, moved = figure.subplots(1, 2)
    for rate, changes in jobs.items():
        steps = range(1, len(changes) + 1)
        label = f"learning rate {rate:.0e}"
        codes.plot(steps, [100 * one["FP8"].share_changed for one in changes], label=label)
        moved.plot(steps, [100 * one["all"].share_moved for one in changes], label=label)
    for axes, title in ((codes, "FP8 codes changed, %"), (moved, "bytes moved, % of all")):
        axes.set(title=title, xlabel="optimiser step", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#e2e8f0")
        axes.spines[["top", "right"]].set_visible(False)
    codes.legend(frameon=False)
    figure.savefig(path)


def _range(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.2%} [{min(shares):.1%}, {max(shares):.1%}]"


def _speed_table(speed: dict[float, dict[str, float]]) -> Table:
    table = Table(title="random codes, one thread", box=None, title_justify="left")
    for heading in ("codes changed", "bytes moved", "copy GB/s", "encode GB/s", "apply GB/s"):
        table.add_column(heading, justify="right")
    for share, row in speed.items():
        rates = (f"{row[name]:.2f}" for name in ("copy", "encode", "apply"))
        table.add_row(f"{share:.1%}", f"{row['share_moved']:.2%}", *rates)
    return table


if __name__ == "__main__":
    main()
