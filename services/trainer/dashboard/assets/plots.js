// Draws the charts of a run with uPlot. Each is made, fed and drawn in one go, so what goes wrong
// is known at once: it is told in the chart's place, and the chart is made anew at the next update.

import { decadeTicks, drawable, formatted, labelledTicks, logarithmicTicks, padded, paddedLogarithmic } from "./axes.js";
import { charts, legend } from "./charts.js";

const HEIGHT = 220;
const STEP_INCREMENTS = Array.from({ length: 10 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** i)).flat();

// Colours are read from the style sheet, so that light and dark are told in one place.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  return { series: Array.from({ length: 9 }, (_, i) => read("series-" + (i + 1))), axis: read("soft"), grid: read("line") };
}

export class Plots {
  #drawn = [];

  constructor(container) {
    this.container = container;
    // In the next frame: resizing inside the observer's own call is reported as an error.
    new ResizeObserver(() => requestAnimationFrame(() => this.#resize())).observe(container);
  }

  // Build anew: another job, or another colour scheme.
  build(run) {
    for (const drawn of this.#drawn) drawn.drop();
    const colours = palette();
    this.#drawn = charts(colours).map((chart) => new Drawn(chart, colours));
    this.container.replaceChildren(...this.#drawn.map(({ box }) => box)); // all, for their widths
    this.update(run);
  }

  update(run) {
    for (const drawn of this.#drawn) drawn.attempt(() => drawn.show(run));
  }

  #resize() {
    for (const drawn of this.#drawn) drawn.attempt(() => drawn.resize());
  }
}

class Drawn {
  #plot = null;

  constructor(chart, colours) {
    this.chart = chart;
    this.colours = colours;
    this.box = titled(chart);
    this.error = document.createElement("p");
    this.error.className = "field-error";
    this.box.append(this.error);
  }

  attempt(what) {
    try {
      what();
    } catch (err) {
      const text = `This chart could not be drawn: ${err.message}. It is made anew at the next update.`;
      if (this.error.textContent !== text) console.error(this.chart.title, err);
      this.error.textContent = text;
      this.drop();
    }
  }

  show(run) {
    const told = this.chart.data(run);
    const data = drawable(told, this.chart.logarithmic);
    if (this.#plot === null) this.#make(told, data);
    else this.#feed(told, data);
    const plot = this.#plot;
    this.error.textContent = "";
    this.box.classList.toggle("empty", data[0].length === 0);
    // Without a cursor on it a legend tells the newest values.
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: null }, false);
  }

  // `batch` draws before it returns: later, in a microtask, nobody would catch an error, and uPlot
  // would wait for that drawing for good.
  #make(told, data) {
    const began = (plot, begin) => {
      this.#plot = plot;
      plot.told = told;
      this.box.append(plot.root);
      plot.batch(begin);
    };
    new uPlot(options(this.chart, this.colours, inner(this.box)), data, began);
  }

  #feed(told, data) {
    const plot = this.#plot;
    const { min, max } = plot.scales.x;
    const zoomed = min > plot.data[0]?.[0] || max < plot.data[0]?.at(-1);
    plot.told = told;
    plot.batch(() => {
      plot.setData(data, !zoomed);
      if (zoomed) plot.redraw();
    });
  }

  resize() {
    const width = inner(this.box);
    if (this.#plot && this.#plot.width !== width) this.#plot.batch((plot) => plot.setSize({ width, height: HEIGHT }));
  }

  drop() {
    this.#plot?.destroy();
    this.#plot = null;
  }
}

function titled(chart) {
  const box = document.createElement("section");
  const title = document.createElement("h3");
  const note = document.createElement("small");
  note.textContent = chart.note;
  title.append(chart.title, " ", note);
  box.append(title);
  return box;
}

const inner = (box) => {
  const style = getComputedStyle(box);
  return Math.max(200, box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
};

function options(chart, colours, width) {
  const axis = { stroke: colours.axis, grid: { stroke: colours.grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false, range: across }, y: scale(chart) },
    series: [{ label: "step", value: (u, _, column, row) => String(legend(u, column, row) ?? "–") }, ...chart.series],
    bands: chart.bands,
    axes: [{ ...axis, size: 28, incrs: STEP_INCREMENTS, space: 45 }, { ...axis, size: 46, ...labels(chart, axis) }],
    cursor: {
      sync: { key: "steps", setSeries: false },
      points: { size: (plot, column) => (plot.series[column].class === "bound" ? 0 : 6) },
    },
    legend: { live: true },
  };
}

// From the first step to the last; one alone has room beside it, not a hundred steps of it.
const across = (_, min, max) => (min !== null && min === max ? [min, min + 1] : [min, max]);

function scale(chart) {
  if (chart.range) return { range: () => chart.range };
  if (chart.logarithmic) return { distr: 3, range: (_, min, max) => paddedLogarithmic(min, max) };
  return { range: (_, min, max) => padded(chart.fromZero ? 0 : min, max) };
}

function labels(chart, axis) {
  const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatted(tick)));
  if (!chart.logarithmic) return { values };
  return {
    values,
    splits: (_, __, min, max) => logarithmicTicks(min, max),
    filter: (_, ticks) => labelledTicks(ticks),
    grid: { ...axis.grid, filter: (_, ticks) => decadeTicks(ticks) },
  };
}
