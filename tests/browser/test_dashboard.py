"""The pages in a real browser: nothing on the console, live, by keyboard, on small screens."""

import json

import pytest
from playwright.async_api import Browser, expect
from redis.asyncio import Redis

from shared import topology
from shared.dead_letters import letter_fields
from shared.job import Job
from shared.registry import Replica, register
from tests.browser.pages import (
    ALL_STEPS,
    CHROMIUM,
    Seen,
    Site,
    long_run,
    put_samples,
    step,
)

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.timeout(120),
]

CUT_ROWS = """box => {
  const edge = box.getBoundingClientRect().bottom;
  return [...box.querySelectorAll("tr")].map((row) => row.getBoundingClientRect())
    .filter((row) => row.top < edge - 1 && row.bottom > edge + 1).length;
}"""


async def test_a_run_of_ten_thousand_steps_is_quick_and_goes_on_live(
    chromium: Browser, served: Site, job: Job
) -> None:
    served.tell(*long_run(job, ALL_STEPS))
    seen = await Seen.open(chromium, served.url)
    page = seen.page
    await expect(page.locator("#charts section")).to_have_count(12, timeout=20_000)
    await expect(page.locator("#tiles")).to_contain_text(f"{ALL_STEPS} / {ALL_STEPS}")
    await expect(page.locator("#link")).to_have_text("live")
    drawn_ms = await page.evaluate(
        """async () => {
          const began = performance.now();
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          return performance.now() - began;
        }"""
    )
    assert drawn_ms < 10_000
    overview = await page.evaluate(f"fetch('/v1/jobs/{served.job_id}/metrics').then(a => a.text())")
    assert len(overview) < 4_000_000
    assert json.loads(overview)["num_steps"] == ALL_STEPS
    served.tell(step(ALL_STEPS + 1))
    await expect(page.locator("#tiles")).to_contain_text(f"{ALL_STEPS + 1} / {ALL_STEPS}")
    newest = page.locator("#charts section").first.locator(".u-value").first
    await expect(newest).to_have_text(str(ALL_STEPS + 1))  # no cursor is on the chart
    await expect(page.locator("#waits")).to_have_text(
        "The trainer waits for groups 46 % of a step and works itself for the rest, longest at "
        "forward and backward (33 %): the trainer is the narrow place."
    )
    await expect(page.locator("#updates tbody tr")).to_have_count(48)
    phases = page.locator("#updates tbody tr").first.locator(".bar .phase")
    titles = await phases.evaluate_all("all => all.map(one => one.title)")
    assert titles == [
        "stage 200.0 ms", "wait 189.0 ms", "load 20.0 ms", "restore 10.0 ms", "probe 50.0 ms",
        "pause 30.0 ms", "resume 1.0 ms",
    ]  # fmt: skip
    assert await page.locator("#updates").evaluate(CUT_ROWS) == 0
    assert await page.locator(".updates").evaluate("box => box.scrollWidth - box.clientWidth") == 0
    events = page.locator("#events tr")
    await expect(events).to_have_count(15)
    await expect(events.first).to_contain_text(
        f"step {ALL_STEPS + 1}, policy version {ALL_STEPS + 1}"
    )
    assert await page.locator("#events").evaluate(CUT_ROWS) == 0
    widths = await phases.evaluate_all("all => all.map(one => parseFloat(one.style.width))")
    assert widths == pytest.approx([40.0, 37.8, 4.0, 2.0, 10.0, 6.0, 0.2])
    assert seen.errors == []


async def test_a_job_without_steps_has_charts_that_say_so(chromium: Browser, served: Site) -> None:
    seen = await Seen.open(chromium, served.url)
    charts = seen.page.locator("#charts section")
    await expect(charts).to_have_count(12, timeout=20_000)
    await expect(seen.page.locator("#charts section.empty")).to_have_count(12)
    await expect(charts.first.locator(".u-value").first).to_be_hidden()
    served.tell(step(1))
    await expect(charts.first.locator(".u-value").first).to_have_text("1")
    await expect(charts.nth(1)).not_to_have_class("empty")
    assert seen.errors == []


async def test_jobs_beyond_the_buttons_are_chosen_from_a_list(
    chromium: Browser, served: Site, job: Job
) -> None:
    seen = await Seen.open(chromium, served.url)
    page = seen.page
    await expect(page.locator("#name")).to_have_text(served.job_id)
    await expect(page.locator("#older")).to_be_hidden()
    for _ in range(9):
        served.app.state.store.add(job)
    await expect(page.locator("#jobs button")).to_have_count(8)
    await expect(page.locator("#older option").first).to_have_text("2 older")
    await page.locator("#older").select_option(served.job_id)
    await expect(page.locator("#name")).to_have_text(served.job_id)
    assert await page.evaluate("location.hash") == f"#{served.job_id}"
    assert seen.errors == []


async def test_a_job_is_paused_resumed_and_cancelled_by_keyboard(
    chromium: Browser, served: Site
) -> None:
    seen = await Seen.open(chromium, served.url)
    page, state = seen.page, seen.page.locator("#state")
    await expect(state).to_have_text("queued")
    await expect(page.locator("#resume")).to_be_hidden()
    await page.locator("#cancel").press("Enter")
    await expect(page.locator("#confirm")).to_contain_text("it cannot be resumed")
    await expect(page.locator("#keep")).to_be_focused()  # Enter alone ends no job
    await page.keyboard.press("Escape")
    await expect(page.locator("#confirm")).to_be_hidden()
    assert served.app.state.store.get(served.job_id).state == "queued"
    for wish, after in [("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")]:
        await page.locator(f"#{wish}").press("Enter")
        await page.keyboard.press("Tab")
        await expect(page.locator("#do")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(state).to_have_text(after)
    await expect(page.locator(".wishes button:visible")).to_have_count(0)
    assert seen.errors == []


async def test_what_is_asked_of_a_running_job_is_told_and_a_refusal_too(
    chromium: Browser, served: Site
) -> None:
    store = served.app.state.store
    store.begin(served.job_id)
    seen = await Seen.open(chromium, served.url)
    page = seen.page
    await page.locator("#pause").click()
    await page.locator("#do").click()
    await expect(page.locator("#wish")).to_have_text("pauses after this step")
    await page.locator("#resume").click()
    store.end(served.job_id, "finished")
    await page.locator("#do").click()
    await expect(page.locator("#confirm-error")).to_contain_text("all of its 10000 steps are taken")
    assert all("409" in error for error in seen.errors)  # the browser tells refused requests


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_rest_page_needs_no_other_host(
    chromium: Browser, served: Site, scheme: str
) -> None:
    context = await chromium.new_context(
        color_scheme=scheme, java_script_enabled=False, viewport={"width": 360, "height": 740}
    )
    page, asked = await context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"{served.url}/docs")
    await expect(page.locator("h1")).to_have_text("Tandem trainer: REST")
    await page.get_by_role("link", name="GET /v1/jobs/{job_id}/metrics").press("Enter")
    await expect(page.locator("section:target")).to_contain_text("The run for a screen")
    assert {url.partition("#")[0] for url in asked} == {f"{served.url}/docs"}
    box = await page.locator("main").bounding_box()
    assert box is not None
    assert box["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_small_screen_shows_all_without_scrolling_sideways(
    chromium: Browser, served: Site, job: Job, scheme: str
) -> None:
    served.tell(*long_run(job, 40))
    how = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    seen = await Seen.open(chromium, served.url, **how)
    await expect(seen.page.locator("#charts section")).to_have_count(12, timeout=20_000)
    error = "HTTP 500: " + "the shard is not what was promised " * 6
    served.tell(("update_failed", {"server": "rollout-1", "policy_version": 40, "error": error}))
    served.tell(("rank_restarted", {"error": "RanksLost: " + "a long story, " * 40}))
    told = seen.page.locator("#events td:last-child")
    await expect(told.first).to_contain_text("RanksLost: a long story")
    await expect(told.first).to_contain_text("…")
    width = await seen.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360
    failure = seen.page.locator("#updates .state.failed")
    await expect(failure).to_have_attribute("title", error)
    for rows in ("#updates", "#events"):
        assert await seen.page.locator(rows).evaluate(CUT_ROWS) == 0
    assert await seen.page.locator(".events").evaluate("one => one.scrollWidth") <= 360
    widths = await told.evaluate_all("all => all.map((one) => one.clientWidth)")
    assert min(widths) > 200  # each reads as a line, not as a column of words
    assert seen.errors == []


async def test_the_form_shows_errors_at_their_fields_and_submits(
    chromium: Browser, served: Site
) -> None:
    seen = await Seen.open(chromium, served.url)
    page = seen.page
    await page.locator("#new").press("Enter")
    await expect(page.locator("#form")).to_be_visible()
    await page.locator('input[name="steps"]').fill("0")
    await page.locator('input[name="data.path"]').fill("assets/none.jsonl")
    await page.locator("#submit").press("Enter")
    await expect(page.locator('input[name="steps"]')).to_have_attribute("aria-invalid", "true")
    await expect(page.locator('input[name="steps"]')).to_be_focused()
    await expect(page.locator('[id="error-steps"]')).to_have_text("Input should be greater than 0")
    await expect(page.locator("#form-errors")).to_be_empty()  # it is told once
    await page.locator('input[name="steps"]').fill("5")
    await page.locator("#submit").click()
    await expect(page.locator('[id="error-data.path"]')).to_contain_text("no such file")
    await page.locator('input[name="data.path"]').fill("assets/arithmetic/train.jsonl")
    await page.locator("#submit").click()
    await expect(page.locator("#form")).to_be_hidden()
    await expect(page.locator("#name")).to_contain_text("demo-")
    assert len(served.app.state.store.all()) == 2
    assert all("422" in error for error in seen.errors)  # the browser tells refused requests


async def test_the_form_opens_without_presets_and_says_why_there_are_none(
    chromium: Browser, served: Site
) -> None:
    seen = await Seen.open(chromium, served.url)
    await seen.page.route("**/v1/presets", lambda route: route.abort())
    await seen.page.locator("#new").click()
    await expect(seen.page.locator("#form-errors")).to_contain_text("the trainer does not answer")
    await seen.page.locator("#close").click()
    await seen.page.unroute("**/v1/presets")
    await seen.page.locator("#new").click()
    await expect(seen.page.locator('input[name="steps"]')).not_to_have_value("")
    await expect(seen.page.locator("#form-errors")).to_be_empty()


async def test_only_who_makes_the_trainer_wait_most_of_a_step_is_the_narrow_place(
    chromium: Browser, served: Site
) -> None:
    def told(wait: float, backlog: dict[str, int]) -> str:
        seconds = {"wait": wait, "optimizer": 0.2, "forward_backward": 0.3}
        fields = {"step_seconds": 1.0, "seconds": seconds, "backlog": backlog, "lag_max": 0}
        return json.dumps([{"name": "step", "fields": {"step": i, **fields}} for i in (1, 2, 3)])

    seen = await Seen.open(chromium, served.url)
    found = []
    for wait, prompts, rollouts in [(0.29, 16, 0), (0.6, 16, 1), (0.6, 1, 16)]:
        events = told(wait, {"prompts": prompts, "rollouts": rollouts})
        found.append(
            await seen.page.evaluate(
                f"""async () => {{
                  const {{ Run }} = await import("/assets/run.js");
                  const run = new Run();
                  run.load({{ events: {events} }});
                  return run.waits();
                }}"""
            )
        )
    assert found == [
        "The trainer waits for groups 29 % of a step and works itself for the rest, longest at "
        "forward and backward (30 %): the trainer is the narrow place.",
        "The trainer waits for groups 60 % of a step, while 16.0 groups are with the samplers and "
        "1.0 with the graders: sampling is the narrow place.",
        "The trainer waits for groups 60 % of a step, while 1.0 groups are with the samplers and "
        "16.0 with the graders: grading is the narrow place.",
    ]


async def test_a_server_behind_is_marked_unless_an_evaluation_holds_it(
    chromium: Browser, served: Site, redis: Redis
) -> None:
    for name, version in [("rollout-0", 9), ("rollout-1", 8), ("rollout-2", 3)]:
        server = Replica(
            service="rollout", name=name, url="http://x", pid=1, policy_version=version
        )
        await register(redis, server)
    asked = {"eval_id": "e3", "policy_version": 3, "replica": "rollout-2"}
    served.tell(("eval_requested", asked))
    seen = await Seen.open(chromium, served.url)
    versions = seen.page.locator("#servers tbody td:nth-child(4)")
    await expect(versions).to_have_text(["9", "8", "3, 6 behind: evaluated"])
    await expect(versions.last.locator(".warning")).to_have_count(0)
    served.tell(("eval_failed", {"eval_id": "e3"}))
    await expect(versions.last.locator(".warning")).to_have_text("3, 6 behind")
    assert seen.errors == []


async def test_dead_letters_tell_their_reason_and_are_queued_again(
    chromium: Browser, served: Site, redis: Redis
) -> None:
    stream = topology.prompts(served.job_id)
    fields = letter_fields(
        b"1-0", b"\xff<i>", reason="PromptGroup: not msgpack", consumer="rollout-0",
        times_delivered=1, max_body_bytes=100,
    )  # fmt: skip
    await redis.xadd(topology.dead(stream), fields)
    seen = await Seen.open(chromium, served.url)
    row = seen.page.locator("#letters tbody tr")
    await expect(row).to_contain_text("PromptGroup: not msgpack")
    again = row.get_by_role("button", name="queue again")
    await seen.page.route("**/requeue", lambda route: route.abort())
    await again.click()
    await expect(row).to_contain_text("the trainer does not answer")
    await expect(again).to_be_enabled()
    await seen.page.unroute("**/requeue")
    await again.click()
    await expect(seen.page.locator("#letters")).to_have_text("none")
    assert await redis.xlen(stream) == 1
    assert all("ERR_FAILED" in error for error in seen.errors)  # the browser tells the first


async def test_samples_are_walked_by_keyboard_and_coloured_both_ways(
    chromium: Browser, served: Site
) -> None:
    names = put_samples(served)
    seen = await Seen.open(chromium, f"{served.url}/samples#{served.job_id}")
    page = seen.page
    await expect(page.locator("#list a")).to_have_count(3)
    for name in names[:2]:
        await page.locator("#list").press("ArrowDown")
        await expect(page.locator("#sample h2")).to_have_text(name)
    tokens = page.locator(".tokens span")
    await expect(tokens).to_have_count(9)
    await expect(tokens.nth(6)).to_have_text("<b>")
    await expect(tokens.first).to_have_class("delta-0")
    await expect(tokens.last).to_have_class("delta-5")
    await page.get_by_role("button", name="by version").press("Enter")
    await expect(tokens.first).to_have_class("version-0")
    await expect(tokens.last).to_have_class("version-1")
    await expect(page.locator("#sample dl")).to_contain_text("score 0")
    assert seen.errors == []
