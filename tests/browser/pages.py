"""The trainer's real application over runs written beforehand, and Debian's Chromium to look at it.

No job runs: its loops are not started, so a test says what happens by adding lines to events.jsonl.
"""

import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from services.trainer.app import create_app
from services.trainer.config import TrainerConfig
from services.trainer.events import EVENTS_FILE
from services.trainer.shown_samples import SampleShelf, ShownSample
from shared.job import Job
from shared.messages import Score
from tests.served import served

CHROMIUM = Path("/usr/bin/chromium")
ALL_STEPS = 10_000


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Headless; a sandbox needs rights that containers do not give."""
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield chromium
        finally:
            await chromium.close()


@dataclass
class Seen:
    """A page and what went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    @classmethod
    async def open(cls, chromium: Browser, url: str, **how: Any) -> "Seen":
        context = await chromium.new_context(**how)
        seen = cls(await context.new_page())
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("console", seen._note)
        await seen.page.goto(url)
        return seen

    def _note(self, told: ConsoleMessage) -> None:
        if told.type in ("error", "warning"):
            self.errors.append(told.text)


@dataclass
class Site:
    """The served application; `job_id` is a job that waits in its queue."""

    app: FastAPI
    url: str
    job_id: str

    @property
    def run_dir(self) -> Path:
        path: Path = self.app.state.runner.run_dir(self.job_id)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def tell(self, *events: tuple[str, dict[str, Any]]) -> None:
        """Append to the run's events, as the conductor does."""
        with (self.run_dir / EVENTS_FILE).open("a") as file:
            for number, (name, fields) in enumerate(events):
                event = {
                    "version": 1, "name": name, "job_id": self.job_id, "service": "trainer",
                    "replica": "trainer", "at_s": 1.7e9 + number, "fields": fields,
                }  # fmt: skip
                file.write(json.dumps(event) + "\n")


@contextlib.asynccontextmanager
async def site(config: TrainerConfig, job: Job) -> AsyncIterator[Site]:
    app = create_app(config)
    async with served(app) as url:
        stored, _ = app.state.store.add(job)
        yield Site(app, url, stored.job_id)
        app.state.draining = True  # event streams end


def step(number: int) -> tuple[str, dict[str, Any]]:
    """A `step` event as the conductor tells it, of a run that learns slowly."""
    wave = math.sin(number / 7)
    return "step", {
        "step": number, "policy_version": number, "groups": 8, "samples": 64, "tokens": 9000,
        "reward_raw": 0.7 - 0.5 * math.exp(-number / 60) + 0.03 * wave,
        "reward_trained": 0.5 + 0.02 * wave,
        "delta_logprob_mean": 0.009 + 0.001 * wave, "delta_logprob_p99": 0.08 + 0.01 * wave,
        "delta_logprob_max": 0.6 + 0.2 * wave, "lag_mean": 0.7, "lag_max": 1,
        "lag_tokens": {"0": 2700, "1": 6300}, "loss": 0.01, "grad_norm": 0.4 + 0.1 * wave,
        "entropy": 0.5 + 0.3 * math.exp(-number / 80), "approx_kl": 1e-4 * (1.2 + wave),
        "response_tokens_mean": 120 + 20 * wave, "truncated_share": 0.05 + 0.02 * wave,
        "step_seconds": 2.4, "tokens_per_s": 3800 + 300 * wave,
        "seconds": {"wait": 1.1, "pack": 0.05, "logprobs": 0.0, "forward_backward": 0.8,
                    "optimizer": 0.1, "export": 0.15, "publish": 0.1, "checkpoint": 0.1},
        "sampled_tokens_per_s": {"rollout-0": 2000.0, "rollout-1": 2100.0},
        "graded_per_s": {"reward-0": 27.0},
        "backlog": {"prompts": 6, "rollouts": 1, "groups": 2}, "open_groups": 15, "slots": 16,
    }  # fmt: skip


def long_run(job: Job, num_steps: int) -> list[tuple[str, dict[str, Any]]]:
    """Its start, steps, evaluations and the updates of two servers."""
    events: list[tuple[str, dict[str, Any]]] = [
        ("job_started", {"job": job.model_dump(mode="json")})
    ]
    for number in range(1, num_steps + 1):
        if number % max(1, num_steps // 8) == 1:
            events.append(_evaluation(number - 1))
        events.append(step(number))
        events += [_update(number, server) for server in ("rollout-0", "rollout-1")]
    return events


def _evaluation(version: int) -> tuple[str, dict[str, Any]]:
    ks = {str(k): min(0.95, 0.3 + 0.1 * i + version * 2e-5) for i, k in enumerate((1, 2, 4, 8))}
    return "eval_finished", {
        "eval_id": f"e{version}", "suite": "heldout", "policy_version": version, "step": version,
        "num_problems": 128, "samples_per_problem": 8, "pass_at_k": ks, "truncated_share": 0.1,
        "pass_at_k_ci": {k: [value - 0.05, value + 0.05] for k, value in ks.items()},
    }  # fmt: skip


def _update(version: int, server: str) -> tuple[str, dict[str, Any]]:
    return "update_committed", {
        "server": server, "policy_version": version, "seconds": 0.5, "stage_s": 0.2, "load_s": 0.02,
        "restore_s": 0.01, "probe_s": 0.05, "pause_s": 0.03, "resume_s": 0.001, "bytes": 5_000_000,
        "pulled_bytes": 300_000, "probe_mean_abs_delta": 0.008,
    }  # fmt: skip


def put_samples(site: Site, **changed: Any) -> list[str]:
    """Three samples of one step; the names, as the list has them."""
    names = [f"{site.job_id}.g000001.{i}" for i in range(3)]
    samples = [_sample(name, place) for place, name in enumerate(names)]
    shelf = SampleShelf(site.run_dir)
    shelf.keep(3, [one.model_copy(update=changed) for one in samples])
    shelf.close()
    return names[::-1]  # furthest from the trainer first


def _sample(name: str, place: int) -> ShownSample:
    texts = ["7", "+", "8", "=", "15", ";", "<b>", " 85", "\n"]
    deltas = np.geomspace(0.002, 2.0, len(texts)) * (1 + place)
    return ShownSample(
        rollout_id=name, step=3, policy_version=2, replica="rollout-0", reward=float(place == 2),
        advantage=0.5, outcome=Score(value=float(place == 2), extracted="85", reason="equal"),
        finish_reason="stop", num_tokens=len(texts), delta_mean=float(deltas.mean()),
        delta_max=float(deltas.max()), versions=[1, 2], prompt="37+48=", gold="85", tokens=texts,
        sampler_logprobs=[-0.5] * len(texts), trainer_logprobs=(-0.5 - deltas).tolist(),
        version_of_token=[1] * 5 + [2] * 4,
    )  # fmt: skip
