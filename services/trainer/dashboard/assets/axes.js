// Numbers on a screen: how a value is written, what can be drawn, how far an axis goes, its ticks.

export const number = (value) => (value === null || value === undefined ? "–" : formatted(value));

export function formatted(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e15) return value.toExponential(1);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return size >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

// Beyond these a curve is a gap: no run means them, and arithmetic of an axis would overflow.
const LARGEST = 1e30, SMALLEST_LOGARITHMIC = 1e-15;

// Copies: a run goes on in its own columns, while a plot compares what it drew with what there is.
export function drawable(columns, logarithmic) {
  const least = logarithmic ? SMALLEST_LOGARITHMIC : -LARGEST;
  const shown = (value) => (Number.isFinite(value) && value >= least && value <= LARGEST ? value : null);
  return columns.map((column, i) => (i === 0 ? column.slice() : column.map(shown)));
}

export function padded(min, max) {
  if (min === null || max === null || (min === 0 && max === 0)) return [0, 1];
  const space = 0.06 * Math.max(max - min, 1e-9 + Math.abs(max) * 1e-3);
  return [min === 0 ? 0 : min - space, max + space];
}

export const paddedLogarithmic = (min, max) => (min === null ? [0.01, 1] : [min / 1.5, max * 1.5]);

// 1 to 9 of each decade, or 1 alone of many. uPlot's own walk never ends from, say, 0.00098 on.
export function logarithmicTicks(min, max) {
  const [first, last] = [Math.floor(Math.log10(min)), Math.floor(Math.log10(max))];
  const digits = last - first < 12 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1];
  const decades = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const ticks = decades.flatMap((decade) => digits.map((digit) => Number(`${digit}e${decade}`)));
  return ticks.filter((tick) => tick >= min && tick <= max);
}

// Of those label some of each decade, or 1 alone where there are many, and few of very many.
export function labelledTicks(ticks) {
  const decades = Math.log10(ticks.at(-1) / ticks[0]);
  const digits = decades > 3 ? [1] : decades < 1 ? [1, 2, 3, 5] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 8));
  return ticks.map((tick) => (digits.includes(leading(tick)) && exponent(tick) % every === 0 ? tick : null));
}

export const decadeTicks = (ticks) => ticks.map((tick) => (leading(tick) === 1 ? tick : null));

const parts = (tick) => tick.toExponential(3).split("e").map(Number);
const leading = (tick) => parts(tick)[0];
const exponent = (tick) => parts(tick)[1];
