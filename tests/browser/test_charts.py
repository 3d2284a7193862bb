"""Charts are drawn whatever a run measures, and one that fails is told and made anew."""

import json
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.browser.pages import CHROMIUM, Seen, Site, step

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.timeout(120),
]
NUM_CHARTS = 12
DRIFT = 1  # its place among the charts
MEASURED = (
    "reward_raw", "reward_trained", "delta_logprob_mean", "delta_logprob_p99", "delta_logprob_max",
    "lag_mean", "lag_max", "tokens_per_s", "step_seconds", "truncated_share",
    "response_tokens_mean", "entropy", "approx_kl", "reference_kl", "grad_norm", "open_groups",
    "slots",
)  # fmt: skip

# Of each chart in a box: is it sized, how much of a small copy is drawn on, its error.
DRAWN = """box => [...box.querySelectorAll("section")].map((one) => {
  const canvas = one.querySelector("canvas");
  const copy = new OffscreenCanvas(80, 40).getContext("2d", { willReadFrequently: true });
  if (canvas) copy.drawImage(canvas, 0, 0, 80, 40);
  const pixels = new Uint32Array(copy.getImageData(0, 0, 80, 40).data.buffer);
  return {
    width: parseFloat(one.querySelector(".u-wrap")?.style.width ?? 0),
    ink: pixels.filter((one) => one).length,
    error: one.querySelector(".field-error").textContent,
  };
})"""

# A box of charts beside the page's own: `window.box`, `window.plots`, `window.newRun(events)`.
APART = """async () => {
  const { Plots } = await import("/assets/plots.js");
  const { Run } = await import("/assets/run.js");
  window.box = document.createElement("div");
  box.id = "box";
  document.body.append(box);
  window.plots = new Plots(box);
  window.newRun = (events) => {
    const run = new Run();
    run.load({ events });
    run.job = { bounds: { max_mean_abs_delta_logprob: 1 } };
    return run;
  };
}"""


async def charts_apart(chromium: Browser, served: Site) -> Seen:
    seen = await Seen.open(chromium, served.url)
    await seen.page.evaluate(APART)
    return seen


async def drawn(seen: Seen, box: str = "#box") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await seen.page.locator(box).evaluate(DRAWN)
    return found


def steps(*values: float | None) -> str:
    """Steps that measure one value everywhere, as a JavaScript expression."""
    events = [
        {"name": "step", "fields": {"step": i, **dict.fromkeys(MEASURED, value)}}
        for i, value in enumerate(values, 1)
    ]
    return json.dumps(events).replace("Infinity", "1e999").replace("NaN", "(0 / 0)")


async def test_an_axis_that_begins_just_below_a_power_of_ten_has_its_curve(
    chromium: Browser, served: Site
) -> None:
    name, fields = step(1)
    served.tell((name, {**fields, "delta_logprob_mean": 1.5 * 0.00098}))
    seen = await Seen.open(chromium, served.url)
    await expect(seen.page.locator("#charts .u-legend").nth(DRIFT)).to_contain_text("0.00147")
    found = (await drawn(seen, "#charts"))[DRIFT]
    assert found["width"] > 300
    assert found["ink"] > 0
    assert found["error"] == ""
    assert seen.errors == []


HOSTILE = {
    "nothing measured": steps(None, None),
    "zeros": steps(0.0, 0.0, 0.0),
    "negative": steps(-3.0, -1e-9),
    "one point": steps(0.25),
    "one value": steps(*[0.25] * 5),
    "denormal": steps(5e-324, 1e-310, 3e-320),
    "tiny": steps(1e-17, 9.7e-26, 0.5),
    "huge": steps(1e300, -1e300, 1.7e308),
    "all at once": steps(0.0, 5e-324, None, -1.0, 1e300, 9.7e-9, 1e-300, 123.0),
    "not finite": steps(float("inf"), float("nan"), 1.0),
    "many steps": f"{steps(0.1, 0.2)}.map((one, i) => (one.fields.step += i * 3e6, one))",
}


async def test_whatever_is_measured_every_chart_is_drawn_and_goes_on(
    chromium: Browser, served: Site
) -> None:
    seen = await charts_apart(chromium, served)
    for name, events in HOSTILE.items():
        await seen.page.evaluate(f"plots.build(newRun({events})), plots.update(newRun({events}))")
        found = await drawn(seen)
        assert len(found) == NUM_CHARTS
        assert all(one["width"] >= 200 and not one["error"] for one in found), (name, found)
        await seen.page.evaluate(
            f"""plots.build(newRun([]));
            plots.update(newRun({events}));
            plots.update(newRun({steps(0.1, 0.2, 0.3)}));"""
        )
        found = await drawn(seen)
        assert all(one["ink"] > 0 and not one["error"] for one in found), (name, found)
    assert seen.errors == []


async def test_a_run_that_goes_on_widens_its_axes_unless_one_looks_closer(
    chromium: Browser, served: Site
) -> None:
    seen = await charts_apart(chromium, served)
    page = seen.page
    await page.evaluate(f"plots.build(window.run = newRun({steps(0.1, 0.2, 0.3)}))")
    chart = page.locator("#box section").first
    await chart.scroll_into_view_if_needed()
    over = await chart.locator(".u-over").bounding_box()
    assert over is not None
    middle = over["y"] + over["height"] / 2

    async def step_at(share: float) -> str:
        """What the legend tells of this share of the axis."""
        await page.mouse.move(over["x"] + share * (over["width"] - 1), middle)
        return await chart.locator(".u-value").first.inner_text()

    async def goes_on(number: int) -> None:
        fields = json.dumps({"step": number, **dict.fromkeys(MEASURED, 0.4)})
        told = f"{{ name: 'step', fields: {fields} }}"
        await page.evaluate(f"run.add({told}, {number + 1000}), plots.update(run)")

    assert (await step_at(0.0), await step_at(1.0)) == ("1", "3")
    for number in range(4, 12):
        await goes_on(number)
    assert (await step_at(0.0), await step_at(1.0)) == ("1", "11")
    await step_at(0.2)
    await page.mouse.down()
    await step_at(0.65)
    await page.mouse.up()
    assert (await step_at(0.0), await step_at(1.0)) == ("3", "7")
    await goes_on(12)
    assert (await step_at(0.0), await step_at(1.0)) == ("3", "7")
    await page.mouse.dblclick(over["x"] + over["width"] / 2, middle)
    assert (await step_at(0.0), await step_at(1.0)) == ("1", "12")
    assert seen.errors == []


async def test_a_legend_tells_what_a_logarithmic_axis_cannot_draw(
    chromium: Browser, served: Site
) -> None:
    seen = await charts_apart(chromium, served)
    await seen.page.evaluate(f"plots.build(newRun({steps(0.1, 0.0)}))")
    values = seen.page.locator("#box .u-legend").nth(DRIFT).locator(".u-value")
    assert await values.all_inner_texts() == ["2", "0", "0", "0", "1"]


async def test_charts_survive_what_happens_while_they_are_made(
    chromium: Browser, served: Site
) -> None:
    """Hidden at first, resized and made anew in one frame, two updates in another."""
    seen = await charts_apart(chromium, served)
    await seen.page.evaluate(
        f"""async () => {{
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          box.style.display = "none";
          plots.build(newRun({steps(0.1)}));
          plots.update(newRun({steps(0.1, 0.2)}));
          await frame();
          box.style.cssText = "width: 900px";
          await frame(); await frame(); await frame();
          plots.build(newRun({steps(0.1)}));
          box.style.width = "700px";
          plots.build(newRun({steps(0.1)}));
          plots.update(newRun({steps(0.1, 0.2)}));
          plots.update(newRun({steps(0.1, 0.2, 0.3)}));
          await frame(); await frame(); await frame();
        }}"""
    )
    found = await drawn(seen)
    assert len(found) == NUM_CHARTS
    assert all(600 < one["width"] < 700 and one["ink"] > 0 for one in found), found
    assert seen.errors == []


@pytest.mark.parametrize("fails", ["made", "fed", "drawn"])
async def test_a_chart_that_fails_says_so_and_is_made_anew(
    chromium: Browser, served: Site, fails: str
) -> None:
    seen = await charts_apart(chromium, served)
    await seen.page.evaluate(
        f"""(fails) => {{
          const run = newRun({steps(0.1, 0.2)});
          const fail = () => {{ throw new Error("<b>no memory"); }};
          const real = uPlot, stroke = CanvasRenderingContext2D.prototype.stroke;
          if (fails === "fed") {{ plots.build(run); run.fit = fail; }}
          if (fails === "made") {{
            let left = 1;
            uPlot = function (...all) {{ return left-- > 0 ? fail() : new real(...all); }};
          }}
          let left = 1;
          if (fails === "drawn")
            CanvasRenderingContext2D.prototype.stroke = function (...all) {{
              return left-- > 0 ? fail() : stroke.apply(this, all);
            }};
          if (fails === "fed") plots.update(run); else plots.build(run);
          [uPlot, CanvasRenderingContext2D.prototype.stroke] = [real, stroke];
        }}""",
        fails,
    )
    failed, *others = await drawn(seen)
    assert failed["width"] == 0
    assert "could not be drawn: <b>no memory" in failed["error"]
    assert all(one["ink"] > 0 and not one["error"] for one in others)
    assert len(seen.errors) == 1  # on the console, once
    assert "no memory" in seen.errors[0]
    await seen.page.evaluate(f"plots.update(newRun({steps(0.1, 0.2, 0.3)}))")
    assert all(one["ink"] > 0 and not one["error"] for one in await drawn(seen))
