// What is known of one run: events in, columns for the charts out. Touches no page element.

const TIMED = ["wait", "pack", "attribute", "logprobs", "forward_backward", "optimizer", "export", "publish", "checkpoint"];
export const PHASES = [...TIMED, "other"]; // what a step took beyond them
export const KS = ["1", "2", "4", "8"];
const BULK = new Set(["group_sampled", "group_graded", "group_dropped", "duplicate_refused"]);
const STEP_FIELDS = [
  "reward_raw", "reward_trained", "delta_logprob_mean", "delta_logprob_p99", "delta_logprob_max", "lag_mean", "lag_max",
  "tokens_per_s", "step_seconds", "groups", "truncated_share", "response_tokens_mean", "entropy", "approx_kl",
  "reference_kl", "grad_norm", "open_groups", "slots",
];
export const phaseName = (name) => (name === "forward_backward" ? "forward and backward" : name.replaceAll("_", " "));
export const STAGES = ["prompts", "rollouts", "groups"];
const KEPT_EVENTS = 60;
const KEPT_UPDATES = 48;
export const UPDATE_PHASES = ["stage", "load", "restore", "probe", "pause", "resume"];
const AVERAGE_STEPS = 10;
const MANY_STEPS = 500; // from here on stacked phases are averaged, or they are noise on a screen

export class Run {
  constructor() {
    this.lines = 0; // how far events.jsonl has been read
    this.job = null;
    this.ended = null;
    this.counts = {};
    this.dropped = {};
    this.events = [];
    this.updates = {}; // server -> its last committed update
    this.lastUpdates = []; // of all servers, oldest first, failed ones too
    this.rowOfStep = new Map();
    this.steps = { step: [] };
    for (const name of STEP_FIELDS) this.steps[name] = [];
    for (const name of PHASES) this.steps["seconds_" + name] = [];
    for (const name of STAGES) this.steps["backlog_" + name] = [];
    this.steps.sampled_per_s = []; // tokens, all servers together
    this.steps.lag_tokens = []; // {lag: tokens}
    this.steps.num_steps = []; // that a row stands for: several of a long run's overview
    this.steps.rates = []; // {replica: what it did a second}
    this.evals = []; // sorted by step
    this.held = {}; // replica -> the evaluation that it keeps an older version for
  }

  // The overview of a long run: everything but single groups, whose numbers come as counts.
  load(overview) {
    for (const event of overview.events ?? []) this.#apply(event);
    this.counts = { ...overview.counts };
    this.dropped = { ...overview.dropped };
    this.lines = overview.after ?? 0;
  }

  add(event, line) {
    if (line <= this.lines) return;
    this.lines = line;
    this.counts[event.name] = (this.counts[event.name] ?? 0) + 1;
    this.#apply(event);
  }

  #apply(event) {
    const fields = event.fields ?? {};
    if (event.name === "step") this.#step(fields);
    else if (event.name === "eval_requested" || event.name === "eval_moved") {
      this.#release(fields.eval_id);
      this.held[fields.replica] = fields.eval_id;
    }
    else if (event.name === "eval_finished") { this.#evaluation(fields); this.#release(fields.eval_id); }
    else if (event.name === "eval_failed") this.#release(fields.eval_id);
    else if (event.name === "group_dropped") this.dropped[fields.reason] = (this.dropped[fields.reason] ?? 0) + 1;
    else if (event.name === "update_committed") { this.updates[fields.server] = fields; this.#update(event); }
    else if (event.name === "update_failed") this.#update(event);
    else if (event.name === "job_started") { this.job = fields.job ?? null; this.ended = null; }
    else if (event.name === "job_finished") this.ended = fields;
    if (!BULK.has(event.name)) {
      this.events.push(event);
      if (this.events.length > KEPT_EVENTS) this.events.shift();
    }
  }

  #update(event) {
    this.lastUpdates.push({ ...event.fields, at_s: event.at_s });
    if (this.lastUpdates.length > KEPT_UPDATES) this.lastUpdates.shift();
  }

  // A step told again (a replay after a crash) replaces the first telling.
  #step(fields) {
    const row = this.rowOfStep.get(fields.step) ?? this.steps.step.length;
    this.rowOfStep.set(fields.step, row);
    this.steps.step[row] = fields.step;
    for (const name of STEP_FIELDS) this.steps[name][row] = fields[name] ?? null;
    this.steps.num_steps[row] = fields.num_steps ?? 1;
    for (const name of TIMED) this.steps["seconds_" + name][row] = fields.seconds?.[name] ?? 0;
    const timed = TIMED.reduce((sum, name) => sum + this.steps["seconds_" + name][row], 0);
    this.steps.seconds_other[row] = Math.max(0, (fields.step_seconds ?? timed) - timed);
    for (const name of STAGES) this.steps["backlog_" + name][row] = fields.backlog?.[name] ?? null;
    const sampled = fields.sampled_tokens_per_s;
    this.steps.sampled_per_s[row] = sampled ? Object.values(sampled).reduce((sum, one) => sum + one, 0) : null;
    this.steps.lag_tokens[row] = fields.lag_tokens ?? null;
    this.steps.rates[row] = { ...sampled, ...fields.graded_per_s };
  }

  #release(evaluation) {
    this.held = Object.fromEntries(Object.entries(this.held).filter(([, id]) => id !== evaluation));
  }

  #evaluation(fields) {
    const step = fields.step ?? fields.policy_version;
    this.evals = this.evals.filter((known) => known.step !== step);
    this.evals.push({ ...fields, step });
    this.evals.sort((a, b) => a.step - b.step);
  }

  get driftBound() { return this.job?.bounds?.max_mean_abs_delta_logprob ?? null; }

  // The straight line through all steps (least squares); null below three of them.
  fit(name) {
    const rows = this.steps.step.map((x, i) => [x, this.steps[name][i]]).filter(([, y]) => y !== null);
    if (rows.length < 3) return this.steps.step.map(() => null);
    const mean = (i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length;
    const [x0, y0] = [mean(0), mean(1)];
    const spread = rows.reduce((sum, [x]) => sum + (x - x0) ** 2, 0);
    const slope = spread ? rows.reduce((sum, [x, y]) => sum + (x - x0) * (y - y0), 0) / spread : 0;
    return this.steps.step.map((x) => y0 + slope * (x - x0));
  }

  // The first of the rows that the last `num` steps are in.
  #rowOfLast(num) {
    let row = this.steps.step.length;
    for (let steps = 0; row > 0 && steps < num; row--) steps += this.steps.num_steps[row - 1];
    return row;
  }

  // Response tokens of the last steps by how many versions behind they were sampled.
  lags(num = 100) {
    const found = {};
    for (const one of this.steps.lag_tokens.slice(this.#rowOfLast(num))) {
      for (const [lag, tokens] of Object.entries(one ?? {})) found[lag] = (found[lag] ?? 0) + tokens;
    }
    return found;
  }

  // What each replica did a second over the last steps; nothing in a step counts as nothing.
  rates(num = 10) {
    const done = {}, from = this.#rowOfLast(num);
    const seconds = this.steps.step_seconds.slice(from).map((one, i) => (one ?? 0) * this.steps.num_steps[from + i]);
    const all = seconds.reduce((sum, one) => sum + one, 0);
    this.steps.rates.slice(from).forEach((rates, i) => {
      for (const [name, rate] of Object.entries(rates)) done[name] = (done[name] ?? 0) + (rate * seconds[i]) / (all || 1);
    });
    return done;
  }

  // Who waits for whom, over the last steps: a sentence, or null while nobody can say.
  waits(num = 20) {
    const recent = (name) => this.steps[name].slice(-num).filter((value) => value !== null);
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const [steps, waits] = [recent("step_seconds"), recent("seconds_wait")];
    if (steps.length < 3 || !recent("backlog_prompts").length) return null;
    const share = mean(waits.slice(-steps.length)) / mean(steps);
    const told = `The trainer waits for groups ${percent(share)} of a step`;
    if (share <= 0.5) {
      const works = PHASES.filter((name) => name !== "wait").map((name) => [mean(recent("seconds_" + name)) / mean(steps), name]);
      const [most, name] = works.reduce((one, other) => (other[0] > one[0] ? other : one));
      return `${told} and works itself for the rest, longest at ${phaseName(name)} (${percent(most)}): the trainer is the narrow place.`;
    }
    const graders = mean(recent("backlog_rollouts")), samplers = mean(recent("backlog_prompts"));
    const narrow = graders > samplers ? "grading" : "sampling";
    return `${told}, while ${samplers.toFixed(1)} groups are with the samplers and ${graders.toFixed(1)} with the graders: ${narrow} is the narrow place.`;
  }

  last(name) { return this.steps[name].at(-1) ?? null; }

  average(name) { return movingAverage(this.steps[name]); }

  get trained() { return this.steps.groups.reduce((sum, num) => sum + (num ?? 0), 0); }

  // [x, sum of all phases, sum of all but the last, ..., first phase]: bands between neighbours.
  stackedPhases() {
    const columns = [];
    const num = this.steps.step.length;
    let below = new Array(num).fill(0);
    for (const name of PHASES) {
      const seconds = this.steps["seconds_" + name];
      const shown = num < MANY_STEPS ? seconds : movingAverage(seconds, Math.floor(num / 100));
      below = shown.map((value, row) => value + below[row]);
      columns.unshift(below);
    }
    return [this.steps.step, ...columns];
  }

  // [x, then value, high, low for each k, then truncated share]
  passAtK() {
    const columns = [this.evals.map((found) => found.step)];
    for (const k of KS) {
      const interval = (found) => found.pass_at_k_ci?.[k] ?? (k === "1" ? found.pass_at_1_ci : null) ?? [null, null];
      columns.push(
        this.evals.map((found) => found.pass_at_k?.[k] ?? null),
        this.evals.map((found) => interval(found)[1]),
        this.evals.map((found) => interval(found)[0]),
      );
    }
    columns.push(this.evals.map((found) => found.truncated_share ?? null));
    return columns;
  }
}

const percent = (share) => `${(100 * share).toFixed(0)} %`;

export function movingAverage(values, window = Math.max(AVERAGE_STEPS, Math.floor(values.length / 50))) {
  const averages = new Array(values.length).fill(null);
  let sum = 0, num = 0;
  for (let end = 0; end < values.length; end++) {
    if (values[end] !== null) { sum += values[end]; num++; }
    const gone = end - window;
    if (gone >= 0 && values[gone] !== null) { sum -= values[gone]; num--; }
    if (num > 0) averages[end] = sum / num;
  }
  return averages;
}
