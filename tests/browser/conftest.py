"""A browser and a trainer's pages, for the tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser
from redis.asyncio import Redis

from services.trainer.config import TrainerConfig
from shared.job import Job
from tests.browser.pages import ALL_STEPS, Site, browser, site


@pytest_asyncio.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as found:
        yield found


@pytest.fixture
def job() -> Job:
    return Job.model_validate(
        {
            "name": "demo",
            "steps": ALL_STEPS,
            "model": {"rollout_checkpoint": "assets/tiny-dsv4"},
            "data": {"path": "assets/arithmetic/train.jsonl"},
            "sampling": {"context_length": 160, "max_response_tokens": 128},
        }
    )


@pytest_asyncio.fixture
async def served(tmp_path: Path, redis_url: str, redis: Redis, job: Job) -> AsyncIterator[Site]:
    config = TrainerConfig(redis_url=redis_url, replica="trainer", runs_dir=tmp_path / "runs")
    async with site(config, job) as found:
        yield found
