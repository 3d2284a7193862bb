// What each chart shows: a title, its series and a function of the run. Drawn by plots.js.

import { number } from "./axes.js";
import { KS, PHASES, phaseName } from "./run.js";

// What a legend tells: the value under the cursor, else the newest there is; `told` holds a plot's
// columns as they were measured, also what its scale cannot draw.
const newest = (column) => column.findLastIndex((value) => value !== null && value !== undefined);
export const legend = (plot, column, row) => plot.told[column][row ?? newest(plot.told[column])];

const line = (label, colour, more = {}) => ({ label, stroke: colour, width: 1.6, points: { show: false }, value: (u, _, column, row) => number(legend(u, column, row)), ...more });
const dots = (label, colour) => line(label, colour, { paths: () => null, points: { show: true, size: 4, width: 0, fill: colour } });
const bound = (colour) => line("", colour, { class: "bound", width: 0 });

export function charts({ series: c, axis }) {
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
        run.steps.step, run.steps.delta_logprob_max, run.steps.delta_logprob_p99,
        run.steps.delta_logprob_mean, run.steps.step.map(() => run.driftBound),
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
      series: PHASES.map((name, i) => line(phaseName(name), c[i] ?? axis, {
        width: 0.5,
        fill: (c[i] ?? axis) + "b0",
        // Column i holds the sum up to its phase; the legend tells the phase alone.
        value: (u, _, column, row) => {
          const at = row ?? u.told[0].length - 1;
          return at < 0 ? "–" : number(u.told[column][at] - (u.told[column + 1]?.[at] ?? 0));
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
      data: (run) => [run.steps.step, run.steps.approx_kl, run.steps.reference_kl],
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
