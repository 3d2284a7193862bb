// The page: which jobs there are, which one is shown, and its event stream.
//
//   GET /v1/jobs, /v1/servers  every 3 s  ->  job buttons, server table
//   GET …/metrics  once per shown job     ->  Run.load       (a long run in one answer)
//   GET …/events   SSE from there         ->  Run.add        (then live)
//   GET …/dead-letters  every 3 s         ->  table, with a button that queues them again
//   Run  ->  charts, tiles, tables, drawn at most four times a second

import { Plots } from "./plots.js";
import { openForm } from "./form.js";
import { Run } from "./run.js";
import * as tables from "./tables.js";
import { drawWishes, setUpWishes } from "./wishes.js";

const POLL_MS = 3000, DRAW_MS = 250, RECONNECT_MS = 2000;
const SHOWN_JOBS = 8;
const STOPPED = new Set(["finished", "failed", "cancelled", "paused"]);
const find = (id) => document.getElementById(id);

let jobs = [], replicas = [], letters = [];
let shown = null; // {id, run, source, timer, ended}
let dirty = false;
const charts = new Plots(find("charts"));

async function getJson(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function pollJobs() {
  jobs = (await getJson("/v1/jobs")).jobs;
  dirty = true;
}

async function poll() {
  try {
    const servers = getJson("/v1/servers").catch(() => ({ servers: replicas }));
    await pollJobs();
    replicas = (await servers).servers ?? [];
    drawJobs();
    await chooseJob();
    await pollLetters();
    dirty = true;
    followAgainIfResumed();
    link(shown?.source ? (shown.source.readyState === EventSource.OPEN ? "live" : "reconnecting") : "idle");
  } catch {
    link("trainer unreachable, trying again");
  }
  setTimeout(poll, POLL_MS);
}

async function pollLetters() {
  if (shown) letters = (await getJson(`/v1/jobs/${encodeURIComponent(shown.id)}/dead-letters`).catch(() => ({ letters: [] }))).letters;
  drawLetters();
}

// Only when they changed: a button must not go away under the finger.
function drawLetters() {
  const key = JSON.stringify(letters.map((one) => one.dead_id));
  if (find("letters").dataset.key === key) return;
  find("letters").dataset.key = key;
  find("letters").replaceChildren(tables.letters(letters, requeue));
}

// Why it was refused, or nothing.
async function requeue(stage, ids) {
  const answer = await fetch(`/v1/jobs/${encodeURIComponent(shown.id)}/dead-letters/requeue`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ stage, dead_ids: ids }),
    signal: AbortSignal.timeout(10000),
  }).catch((err) => ({ ok: false, json: async () => ({ detail: `the trainer does not answer: ${err.message}` }) }));
  if (!answer.ok) return String((await answer.json()).detail);
  await pollLetters();
  return "";
}

function drawJobs() {
  drawOlder();
  const buttons = jobs.slice(-SHOWN_JOBS).reverse().map((job) => {
    const button = document.createElement("button");
    button.textContent = job.job_id;
    button.title = job.state;
    button.dataset.state = job.state;
    button.setAttribute("aria-pressed", String(job.job_id === shown?.id));
    button.onclick = () => { location.hash = job.job_id; };
    return button;
  });
  if (!find("jobs").contains(document.activeElement)) find("jobs").replaceChildren(...buttons);
  find("empty").hidden = jobs.length > 0;
  find("job").hidden = jobs.length === 0;
}

// Jobs beyond the buttons; not while somebody chooses among them.
function drawOlder() {
  const older = jobs.slice(0, -SHOWN_JOBS).reverse(), list = find("older");
  list.hidden = older.length === 0;
  if (list === document.activeElement) return;
  const label = new Option(`${older.length} older`, "");
  list.replaceChildren(label, ...older.map((job) => new Option(`${job.job_id} (${job.state})`, job.job_id)));
  list.value = older.some((job) => job.job_id === shown?.id) ? shown.id : "";
}

async function chooseJob() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const job = jobs.find((known) => known.job_id === wanted) ?? jobs.at(-1);
  if (job && job.job_id !== shown?.id) await show(job.job_id);
}

async function show(id) {
  shown?.source?.close();
  clearTimeout(shown?.timer);
  const run = new Run();
  const view = (shown = { id, run, source: null, timer: null, ended: false });
  const overview = await getJson(`/v1/jobs/${encodeURIComponent(id)}/metrics`).catch(() => ({}));
  if (shown !== view) return;
  // Without `after` nobody can say where the stream goes on: read it from the start instead.
  if (overview.after !== undefined) run.load(overview);
  charts.build(run);
  drawJobs();
  follow(view);
}

// A paused job's stream ends; when it is resumed there is more to come.
function followAgainIfResumed() {
  const state = jobs.find((known) => known.job_id === shown?.id)?.state;
  if (shown?.ended && state && !STOPPED.has(state)) { shown.ended = false; follow(shown); }
}

function follow(view) {
  const source = new EventSource(`/v1/jobs/${encodeURIComponent(view.id)}/events?after=${view.run.lines}`);
  view.source = source;
  source.onopen = () => link("live");
  source.onmessage = (message) => {
    view.run.add(JSON.parse(message.data), Number(message.lastEventId));
    dirty = true;
  };
  source.addEventListener("end", () => { source.close(); view.source = null; view.ended = true; link("idle"); dirty = true; });
  source.onerror = () => {
    if (shown !== view) return;
    link("reconnecting");
    if (source.readyState === EventSource.CLOSED) view.timer = setTimeout(() => follow(view), RECONNECT_MS);
  };
}

function link(text) {
  find("link").textContent = text;
  find("link").dataset.state = text;
}

// Whatever goes wrong in one drawing is told; the next one is tried all the same.
function draw() {
  if (dirty && shown && !document.hidden) {
    dirty = false;
    try {
      drawShown();
      find("trouble").hidden = true;
    } catch (err) {
      console.error(err);
      find("trouble").textContent = `A part of this page could not be drawn: ${err.message}`;
      find("trouble").hidden = false;
    }
  }
  setTimeout(draw, DRAW_MS);
}

function drawShown() {
  const { run } = shown;
  const job = jobs.find((known) => known.job_id === shown.id) ?? {};
  drawTitle(job, run);
  charts.update(run);
  find("tiles").replaceChildren(...tables.tiles(run, job.steps ?? run.job?.steps));
  find("servers").replaceChildren(tables.servers(replicas, run));
  find("lags").replaceChildren(tables.lags(run));
  const waits = run.waits();
  find("waits").hidden = waits === null;
  find("waits").textContent = waits ?? "";
  find("groups").replaceChildren(tables.groups(run));
  find("updates").replaceChildren(tables.updates(run));
  find("events").replaceChildren(tables.events(run));
}

function drawTitle(job, run) {
  // The stream tells an end first; a job that was cancelled while it was paused only its status.
  const isOver = STOPPED.has(job.state) || !run.ended;
  const state = (isOver ? job.state : run.ended.state) ?? "unknown";
  const error = isOver ? job.error : run.ended.error;
  find("name").textContent = shown.id;
  document.title = `${shown.id} · Tandem`;
  find("state").textContent = state;
  find("state").className = `state ${state}`;
  find("progress").max = job.steps ?? run.job?.steps ?? 1;
  find("progress").value = run.last("step") ?? 0;
  find("error").hidden = !error;
  find("error").textContent = error ?? "";
  find("warnings").replaceChildren(...(job.warnings ?? []).map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
  drawWishes({ ...job, state });
  find("files").hidden = !STOPPED.has(state);
  find("evals").hidden = run.evals.length === 0;
  find("evals").href = `/evals#${encodeURIComponent(shown.id)}`;
  find("samples").href = `/samples#${encodeURIComponent(shown.id)}`;
  find("report").href = `/v1/jobs/${encodeURIComponent(shown.id)}/report`;
  find("summary").href = `/v1/jobs/${encodeURIComponent(shown.id)}/summary`;
}

addEventListener("hashchange", chooseJob);
setUpWishes(pollJobs);
find("phases").replaceChildren(...tables.phases());
find("older").onchange = () => { if (find("older").value) location.hash = find("older").value; };
find("new").onclick = () => openForm((id) => { location.hash = id; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown && charts.build(shown.run));
poll();
draw();
