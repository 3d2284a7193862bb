// Tiles and tables. Text goes in as text: nothing from a job or an event becomes markup.

import { number } from "./axes.js";
import { UPDATE_PHASES } from "./run.js";

const words = (name) => name.replaceAll("_", " ");

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function table(head, rows) {
  if (rows.length === 0) return element("p", "nothing yet", "soft");
  const made = element("table");
  if (head.length) {
    const top = made.createTHead().insertRow();
    for (const name of head) top.append(element("th", name));
  }
  const body = made.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const cell of cells) {
      if (cell instanceof Node) row.insertCell().append(cell);
      else row.insertCell().textContent = String(cell ?? "–");
    }
  }
  return made;
}

export function tiles(run, steps) {
  const last = run.evals.at(-1);
  const interval = last?.pass_at_1_ci ?? last?.pass_at_k_ci?.["1"];
  const reward = run.average("reward_raw").at(-1);
  const items = [
    ["step", `${run.last("step") ?? 0} / ${steps ?? "?"}`, "taken"],
    ["reward", number(reward), "moving average"],
    ["mean |Δ log p|", number(run.last("delta_logprob_mean")), "sampler from trainer"],
    ["lag", number(run.last("lag_mean")), "versions behind, mean"],
    ["tokens / s", number(run.last("tokens_per_s")), "trained"],
    ["pass@1", last ? number(last.pass_at_k["1"]) : "–",
      last ? `version ${last.policy_version}` + (interval ? `, [${interval.map(number).join(", ")}]` : "") : "not evaluated yet"],
  ];
  return items.map(([name, value, told]) => {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value), element("dd", told, "soft"));
    return tile;
  });
}

export function servers(replicas, run) {
  const rates = run?.rates() ?? {};
  const newest = Math.max(...replicas.map((replica) => replica.policy_version ?? 0));
  const rows = replicas.map((replica) => {
    const update = run?.updates[replica.name];
    return [
      replica.name,
      replica.engine || replica.service,
      state(replica),
      version(replica, newest, run?.held[replica.name]),
      update?.pause_s === undefined ? "–" : `${(1000 * update.pause_s).toFixed(0)} ms`,
      number(update?.probe_mean_abs_delta),
      rate(replica, rates[replica.name]),
    ];
  });
  return table(["server", "engine", "state", "version", "last pause", "last probe |Δ log p|", "last 10 steps"], rows);
}

function state(replica) {
  const made = element("span");
  made.append(element("span", words(replica.state) + (replica.gave_up ? ", gave up" : ""), "state " + replica.state));
  if (replica.trouble) made.append(element("small", cut(replica.trouble), "trouble warning"));
  return made;
}

// One behind is a server that updates; more is one that an evaluation holds, or one to look after.
function version(replica, newest, held) {
  const behind = newest - replica.policy_version;
  if (replica.policy_version === null || replica.policy_version === undefined || behind < 2) return replica.policy_version;
  const told = `${replica.policy_version}, ${behind} behind`;
  return held ? element("span", `${told}: evaluated`, "soft") : element("span", told, "warning");
}

function rate(replica, value) {
  if (value === undefined) return "–";
  return `${number(value)} ${replica.service === "reward" ? "samples" : "tokens"}/s`;
}

// Response tokens of the last 100 steps by how old their version was.
export function lags(run) {
  const found = Object.entries(run.lags()).sort((a, b) => a[0] - b[0]);
  const all = found.reduce((sum, [, tokens]) => sum + tokens, 0);
  return table(["versions behind", "", "response tokens"], found.map(([lag, tokens]) => {
    const made = element("div", undefined, "bar");
    const part = element("i", "", "phase");
    part.style.width = `${(100 * tokens) / all}%`;
    made.append(part);
    return [lag, made, `${((100 * tokens) / all).toFixed(1)} %`];
  }));
}

// What could not be handled; `requeue(stage, ids)` puts it back, or says why not.
export function letters(found, requeue) {
  const rows = found.map((letter) => {
    const button = element("button", "queue again");
    button.disabled = !letter.is_whole;
    button.title = letter.is_whole ? "as a new message of its stream" : "only an excerpt was kept";
    const refused = element("small", "", "field-error trouble"), last = element("div");
    last.append(button, refused);
    button.onclick = async () => {
      button.disabled = true;
      refused.textContent = await requeue(letter.stage, [letter.dead_id]);
      button.disabled = refused.textContent === "";
    };
    return [
      element("time", new Date(1000 * letter.buried_at_s).toLocaleTimeString()),
      letter.stage, letter.reason, letter.consumer, letter.times_delivered, `${letter.body_bytes} bytes`, last,
    ];
  });
  return rows.length ? table(["at", "stage", "reason", "buried by", "tried", "size", ""], rows) : element("p", "none", "soft");
}

// One bar per update, newest first, to one scale: what a server did when, and how much came to it.
export function updates(run) {
  const shown = [...run.lastUpdates].reverse();
  const longest = Math.max(...shown.map((update) => update.seconds ?? 0), 1e-6);
  const rows = shown.map((update) => [
    element("time", new Date(1000 * update.at_s).toLocaleTimeString()),
    update.server,
    update.policy_version,
    update.error ? failure(update.error) : bar(update, longest),
    update.seconds === undefined ? "–" : `${update.seconds.toFixed(2)} s`,
    pulled(update),
    number(update.probe_mean_abs_delta),
  ]);
  return table(["at", "server", "version", "phases", "took", "pulled", "probe |Δ log p|"], rows);
}

// What the colours of those bars are.
export function phases() {
  const [first, ...others] = UPDATE_PHASES;
  return [first, "wait", ...others].flatMap((name) => {
    const made = element("span");
    made.append(element("i", "", "phase " + name), name);
    return [made, " "];
  });
}

function failure(error) {
  const made = element("span", error, "state failed");
  made.title = error;
  return made;
}

function bar(update, longest) {
  const made = element("div", undefined, "bar");
  const known = UPDATE_PHASES.map((name) => [name, update[name + "_s"] ?? 0]);
  if (update.proven_in_pause) known.find(([name]) => name === "pause")[1] -= update.restore_s + update.probe_s;
  const rest = (update.seconds ?? 0) - known.reduce((sum, [, seconds]) => sum + seconds, 0);
  known.splice(1, 0, ["wait", Math.max(0, rest)]); // for the first server's commit, and for calls
  for (const [name, seconds] of known) {
    const part = element("i", "", "phase " + name);
    part.style.width = `${(100 * seconds) / longest}%`;
    part.title = `${name} ${(1000 * seconds).toFixed(1)} ms`;
    made.append(part);
  }
  return made;
}

function pulled(update) {
  if (update.pulled_bytes === undefined) return "–";
  const share = update.bytes ? ` (${((100 * update.pulled_bytes) / update.bytes).toFixed(0)} %)` : "";
  return `${(update.pulled_bytes / 1e6).toFixed(2)} MB${share}`;
}

export function groups(run) {
  const rows = [
    ["sampled", run.counts.group_sampled ?? 0],
    ["graded", run.counts.group_graded ?? 0],
    ["trained", run.trained],
    ...Object.entries(run.dropped).sort((a, b) => b[1] - a[1]).map(([reason, num]) => ["dropped: " + words(reason), num]),
    ["duplicates refused", run.counts.duplicate_refused ?? 0],
    ["prompts skipped", run.counts.prompt_skipped ?? 0],
    ...run.events.filter((event) => event.name === "pairs_skipped").slice(-1)
      .map((event) => ["warm-up pairs skipped", event.fields.number]),
  ];
  return table([], rows);
}

export function events(run) {
  const rows = run.events.slice(-SHOWN_EVENTS).reverse().map((event) => [
    element("time", new Date(1000 * event.at_s).toLocaleTimeString()),
    event.replica,
    words(event.name),
    shortFields(event.fields ?? {}),
  ]);
  return table([], rows);
}

const SHOWN_EVENTS = 15;
const LONGEST_TEXT = 200;
const FIRST = ["step", "policy_version", "server", "replica", "state", "error", "reward_raw", "delta_logprob_mean", "step_seconds", "pause_s"];

const cut = (text) => (text.length > LONGEST_TEXT ? text.slice(0, LONGEST_TEXT) + "…" : text);

// By what a field's name ends with. A version is no "10.0 k".
function measured(name, value) {
  if (/(^|_)bytes$/.test(name)) return `${words(name.replace(/_?bytes$/, ""))} ${(value / 1e6).toFixed(2)} MB`.trim();
  const told = Number.isInteger(value) ? value : number(value);
  return name.endsWith("_s") ? `${words(name.slice(0, -2))} ${told} s` : `${words(name)} ${told}`;
}

// The fields that tell most, then whichever come first.
function shortFields(fields) {
  const shown = [];
  const names = [...FIRST.filter((name) => name in fields), ...Object.keys(fields).filter((name) => !FIRST.includes(name))];
  for (const name of names) {
    const value = fields[name];
    if (typeof value === "number") shown.push(measured(name, value));
    else if (typeof value === "string") shown.push(`${words(name)} ${cut(value)}`);
    if (shown.length === 5) break;
  }
  return shown.join(", ");
}
