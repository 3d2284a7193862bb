"""Text of jobs, servers, samples and letters is shown as text: none of it becomes markup."""

from typing import Any

import pytest
from playwright.async_api import Browser, expect
from redis.asyncio import Redis

from shared import topology
from shared.dead_letters import letter_fields
from shared.messages import Score
from shared.registry import Replica, register
from tests.browser.pages import CHROMIUM, Seen, Site, long_run, put_samples, step

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.timeout(120),
]
EVIL = """<img class=evil src=x onerror="window.hacked=1"><script>window.hacked=1</script>"""


async def _is_text(seen: Seen) -> None:
    assert await seen.page.evaluate("window.hacked") is None
    assert await seen.page.evaluate("document.querySelectorAll('.evil, main script').length") == 0
    assert seen.errors == []


async def test_the_dashboard_shows_hostile_names_and_errors_as_text(
    chromium: Browser, served: Site, redis: Redis, job: Any
) -> None:
    failed = {"server": EVIL, "policy_version": 3, "error": EVIL}
    name, fields = step(5)
    served.tell(
        *long_run(job, 4),
        ("update_failed", failed),
        ("group_dropped", {"group_id": EVIL, "reason": EVIL}),
        (name, {**fields, "lag_tokens": {EVIL: 5}, "sampled_tokens_per_s": {EVIL: 5.0}}),
        (EVIL, {EVIL: EVIL}),
        ("job_finished", {"state": "failed", "error": EVIL}),
    )
    served.app.state.store.begin(served.job_id)
    served.app.state.store.end(served.job_id, "failed", error=EVIL)
    await register(
        redis,
        Replica(
            service="rollout", name=EVIL, url="http://x", pid=1, engine=EVIL, state="starting",
            policy_version=2, trouble=EVIL, gave_up=True,
        ),
    )  # fmt: skip
    letter = letter_fields(
        b"1-0", b"x", reason=EVIL, consumer=EVIL, times_delivered=1, max_body_bytes=100
    )
    await redis.xadd(topology.dead(topology.prompts(served.job_id)), letter)
    seen = await Seen.open(chromium, served.url)
    for part in ("#error", "#servers", "#groups", "#lags", "#letters", "#updates", "#events"):
        await expect(seen.page.locator(part)).to_contain_text(EVIL)
    await expect(seen.page.locator("#servers .trouble")).to_have_text(EVIL)
    await _is_text(seen)


async def test_a_sample_shows_its_texts_as_text(chromium: Browser, served: Site) -> None:
    put_samples(
        served, prompt=EVIL, gold=EVIL, tokens=[EVIL] * 9, replica=EVIL, finish_reason=EVIL,
        outcome=Score(value=0.0, extracted=EVIL, reason=EVIL),
    )  # fmt: skip
    seen = await Seen.open(chromium, f"{served.url}/samples#{served.job_id}")
    await seen.page.locator("#list a").first.click()
    await expect(seen.page.locator(".tokens span")).to_have_count(9)
    for tokens in await seen.page.locator(".tokens span").all_inner_texts():
        assert tokens == EVIL
    await expect(seen.page.locator("#sample pre").first).to_have_text(EVIL)
    await expect(seen.page.locator("#sample dl")).to_contain_text(EVIL)
    await _is_text(seen)


async def test_an_address_with_markup_in_it_is_told_as_text(
    chromium: Browser, served: Site
) -> None:
    seen = await Seen.open(chromium, f"{served.url}/samples#%3Cimg%20class=evil%20src=x%3E")
    await expect(seen.page.locator("#told")).to_contain_text("404")
    assert await seen.page.locator(".evil").count() == 0
