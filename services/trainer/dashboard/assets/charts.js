// The curves, drawn with uPlot. Each chart is a title, its series and a function of the run.

import { KS, PHASES } from "./run.js";

const HEIGHT = 220;
const number = (value) => (value === null || value === undefined ? "–" : formatted(value));
// What a legend tells: the value under the cursor, else the newest there is.
const newest = (column) => column.findLastIndex((value) => value !== null && value !== undefined);
const told = (plot, column, row) => plot.data[column][row ?? newest(plot.data[column])];

export function formatted(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return size >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

// Colours are read from the style sheet, so that light and dark are told in one place.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  return { read, series: Array.from({ length: 9 }, (_, i) => read("series-" + (i + 1))), axis: read("soft"), grid: read("line") };
}

const line = (label, colour, more = {}) => ({ label, stroke: colour, width: 1.6, points: { show: false }, value: (u, _, column, row) => number(told(u, column, row)), ...more });
const dots = (label, colour) => line(label, colour, { paths: () => null, points: { show: true, size: 4, width: 0, fill: colour } });
const bound = (colour) => line("", colour, { class: "bound", width: 0 });

function charts({ series: c, axis }) {
  return [
    {
      title: "Online reward",
      note: "mean over all graded samples; what is trained on is less, and biased",
      series: [dots("each step", c[0] + "80"), line("average", c[0], { width: 2.2 }), line("fit", c[1], { dash: [6, 4] }), line("trained groups, average", axis)],
      data: (run) => [run.steps.step, run.steps.reward_raw, run.average("reward_raw"), run.fit("reward_raw"), run.average("reward_trained")],
    },
    {
      title: "|Δ log p|, sampler − trainer",
      series: [line("max", axis, { width: 1 }), line("p99", c[1]), line("mean", c[0], { width: 2 }), line("mean that pauses the job", c[3], { dash: [6, 4] })],
      note: "of each sampled token; logarithmic. The dashed line is for the mean alone: max may cross it",
      data: (run) => [
        run.steps.step, positive(run.steps.delta_logprob_max), positive(run.steps.delta_logprob_p99),
        positive(run.steps.delta_logprob_mean), run.steps.step.map(() => run.driftBound),
      ],
      logarithmic: true,
    },
    {
      title: "Offline pass@k",
      note: "held-out problems that one of k answers solves; 95 % intervals",
      series: [
        ...KS.flatMap((k, i) => [line("pass@" + k, c[i], { points: { show: true, size: 6, fill: c[i] } }), bound(c[i]), bound(c[i])]),
        line("truncated", axis, { dash: [4, 4], points: { show: true, size: 5 } }),
      ],
      bands: KS.map((_, i) => ({ series: [3 * i + 2, 3 * i + 3], fill: c[i] + "26" })),
      data: (run) => run.passAtK(),
      range: [0, 1],
    },
    {
      title: "Throughput",
      note: "tokens a second; each server's own is in its table",
      series: [line("trained, each step", c[2] + "80", { width: 1 }), line("trained, average", c[2], { width: 2 }), line("sampled, average", c[0])],
      data: (run) => [run.steps.step, run.steps.tokens_per_s, run.average("tokens_per_s"), run.average("sampled_per_s")],
      fromZero: true,
    },
    {
      title: "Step time by phase",
      note: "seconds, stacked; wait: for groups, other: not timed",
      series: PHASES.map((name, i) => line(name.replaceAll("_", " "), c[i] ?? axis, {
        width: 0.5,
        fill: (c[i] ?? axis) + "b0",
        // Column i holds the sum up to its phase; the legend tells the phase alone.
        value: (u, _, column, row) => {
          const at = row ?? u.data[0].length - 1;
          return at < 0 ? "–" : number(u.data[column][at] - (u.data[column + 1]?.[at] ?? 0));
        },
      })).reverse(),
      bands: PHASES.slice(1).map((_, i) => ({ series: [i + 1, i + 2] })),
      data: (run) => run.stackedPhases(),
      fromZero: true,
    },
    {
      title: "Lag",
      note: "versions between the one that sampled and the one trained",
      series: [dots("largest", c[1]), line("mean", c[0])],
      data: (run) => [run.steps.step, run.steps.lag_max, run.steps.lag_mean],
      fromZero: true,
    },
    {
      title: "Queues and slots",
      note: "groups at the end of a step; an open one takes a slot",
      series: [line("wait for a sampler", c[0]), line("for a grader", c[1]), line("for the trainer", c[2]), line("open", c[4]), line("slots", axis, { dash: [4, 4] })],
      data: (run) => [run.steps.step, run.steps.backlog_prompts, run.steps.backlog_rollouts, run.steps.backlog_groups, run.steps.open_groups, run.steps.slots],
      fromZero: true,
    },
    {
      title: "Response length",
      note: "tokens, mean of a step's samples",
      series: [dots("each step", c[5] + "80"), line("average", c[5], { width: 2 })],
      data: (run) => [run.steps.step, run.steps.response_tokens_mean, run.average("response_tokens_mean")],
      fromZero: true,
    },
    {
      title: "Truncated responses",
      note: "share that the token budget cut off",
      series: [dots("each step", c[3] + "80"), line("average", c[3], { width: 2 })],
      data: (run) => [run.steps.step, run.steps.truncated_share, run.average("truncated_share")],
      range: [0, 1],
    },
    {
      title: "Entropy",
      note: "of the policy at the sampled tokens, in nats",
      series: [dots("each step", c[2] + "80"), line("average", c[2], { width: 2 })],
      data: (run) => [run.steps.step, run.steps.entropy, run.average("entropy")],
      fromZero: true,
    },
    {
      title: "KL",
      note: "k3 estimate, nats a token; logarithmic",
      series: [line("trainer from sampler", c[0]), line("trainer from reference", c[4])],
      data: (run) => [run.steps.step, positive(run.steps.approx_kl), positive(run.steps.reference_kl)],
      logarithmic: true,
    },
    {
      title: "Gradient norm",
      note: "before clipping; a jump warns of a step too large",
      series: [dots("each step", c[1] + "80"), line("average", c[1], { width: 2 })],
      data: (run) => [run.steps.step, run.steps.grad_norm, run.average("grad_norm")],
      fromZero: true,
    },
  ];
}

export class Charts {
  #drawn = [];

  constructor(container) {
    this.container = container;
    // In the next frame: resizing inside the observer's own call is reported as an error.
    new ResizeObserver(() => requestAnimationFrame(() => this.#resize())).observe(container);
  }

  // Build anew: another job, or another colour scheme.
  build(run) {
    for (const { plot } of this.#drawn) plot.destroy();
    this.container.replaceChildren();
    const colours = palette();
    this.#drawn = charts(colours).map((chart) => this.#place(chart, colours, run));
  }

  update(run) {
    for (const { chart, box, plot } of this.#drawn) {
      const data = chart.data(run);
      const { min, max } = plot.scales.x;
      const [first, last] = [plot.data[0]?.[0], plot.data[0]?.at(-1)];
      const zoomed = min > first || max < last;
      plot.setData(data, !zoomed);
      if (zoomed) plot.redraw();
      this.#tell(box, plot);
    }
  }

  // Without a cursor on it a legend tells the newest values; without data it only names the curves.
  #tell(box, plot) {
    box.classList.toggle("empty", plot.data[0].length === 0);
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: null }, false);
  }

  #place(chart, colours, run) {
    const box = document.createElement("section");
    const title = document.createElement("h3");
    title.textContent = chart.title;
    const note = document.createElement("small");
    note.textContent = chart.note ?? "";
    title.append(" ", note);
    box.append(title);
    this.container.append(box);
    const plot = new uPlot(options(chart, colours, box), chart.data(run), box);
    this.#tell(box, plot);
    return { chart, box, plot };
  }

  #resize() {
    for (const { box, plot } of this.#drawn) plot.setSize({ width: inner(box), height: HEIGHT });
  }
}

const inner = (box) => {
  const style = getComputedStyle(box);
  return Math.max(200, box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
};

function options(chart, colours, box) {
  const axis = { stroke: colours.axis, grid: { stroke: colours.grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  let y = { range: (_, min, max) => padded(chart.fromZero ? 0 : min, max) };
  if (chart.range) y = { range: () => chart.range };
  if (chart.logarithmic) y = { distr: 3, range: (_, min, max) => (min === null ? [0.01, 1] : [min / 1.5, max * 1.5]) };
  return {
    width: inner(box),
    height: HEIGHT,
    scales: { x: { time: false }, y },
    series: [{ label: "step", value: (u, _, column, row) => String(told(u, column, row) ?? "–") }, ...chart.series],
    bands: chart.bands,
    axes: [
      { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], space: 45 },
      { ...axis, grid: chart.logarithmic ? { ...axis.grid, filter: decades } : axis.grid, size: 46, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatted(tick))), filter: chart.logarithmic ? readable : undefined },
    ],
    cursor: {
      sync: { key: "steps", setSeries: false },
      points: { size: (plot, column) => (plot.series[column].class === "bound" ? 0 : 6) },
    },
    legend: { live: true },
  };
}

// On a logarithmic axis label 1, 2 and 5 of each decade, or 1 alone where there are many.
const readable = (_, ticks) => {
  const digits = ticks.at(-1) / ticks[0] > 3e4 ? [1] : [1, 2, 5];
  return ticks.map((tick) => (digits.includes(leading(tick)) ? tick : null));
};
const leading = (tick) => Number(tick.toExponential(3).split("e")[0]);
const decades = (_, ticks) => ticks.map((tick) => (leading(tick) === 1 ? tick : null));
const positive = (values) => values.map((value) => (value > 0 ? value : null));

export function padded(min, max) {
  if (min === null || max === null || (min === 0 && max === 0)) return [0, 1];
  const space = 0.06 * Math.max(max - min, 1e-9 + Math.abs(max) * 1e-3);
  return [min === 0 ? 0 : min - space, max + space];
}
