// The sample browser: #job or #job/rollout. Text of a sample goes in as text, never as markup.

const find = (id) => document.getElementById(id);
const POLL_MS = 5000;
const SERIES = 8; // colours of versions, in turns
let heads = [], shown = null, colour = "delta", drawn = "";

const [job] = decodeURIComponent(location.hash.slice(1)).split("/");
const chosen = () => decodeURIComponent(location.hash.slice(1)).split("/")[1];

async function getJson(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const number = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString());

async function poll() {
  try {
    heads = (await getJson(`/v1/jobs/${encodeURIComponent(job)}/samples`)).samples;
    find("told").textContent = `${heads.length} samples of ${job}`;
    drawList();
  } catch (err) {
    find("told").textContent = String(err.message);
  }
  setTimeout(poll, POLL_MS);
}

function drawList() {
  const key = heads.map((head) => head.rollout_id).join();
  if (key !== drawn) {
    drawn = key;
    find("list").replaceChildren(...heads.map(item));
  }
  for (const link of find("list").children) link.setAttribute("aria-current", String(link.dataset.id === chosen()));
}

function item(head) {
  const link = element("a");
  link.href = `#${encodeURIComponent(job)}/${encodeURIComponent(head.rollout_id)}`;
  link.dataset.id = head.rollout_id;
  const verdict = head.outcome.kind === "score" ? number(head.reward) : head.outcome.kind;
  link.append(
    element("b", `step ${head.step}`), ` ${head.rollout_id.slice(job.length + 1)} `,
    element("span", verdict, head.reward > 0 ? "good" : "bad"), " ",
    element("small", `|Δ| ${number(head.delta_mean)} · ${head.num_tokens} tokens · ${head.finish_reason}`),
  );
  return link;
}

async function show() {
  const id = chosen();
  if (!id) return;
  drawList();
  try {
    shown = await getJson(`/v1/jobs/${encodeURIComponent(job)}/samples/${encodeURIComponent(id)}`);
    draw();
  } catch (err) {
    find("sample").replaceChildren(element("p", String(err.message), "warning"));
  }
}

function draw() {
  const { outcome } = shown;
  const facts = [
    ["outcome", outcome.kind === "score" ? `score ${number(outcome.value)}` : outcome.kind],
    ["reason", outcome.reason || (outcome.after_s ? `after ${outcome.after_s} s` : "–")],
    ["extracted", outcome.extracted || "–"],
    ["gold", shown.gold],
    ["reward, advantage", `${number(shown.reward)}, ${number(shown.advantage)}`],
    ["|Δ log p| mean, max", `${number(shown.delta_mean)}, ${number(shown.delta_max)}`],
    ["sampled by", `${shown.replica}, version ${shown.versions.join(", ")}`],
    ["trained", `step ${shown.step}, version ${shown.policy_version}`],
    ["ended", shown.finish_reason === "length" ? "truncated by the token budget" : shown.finish_reason],
  ];
  const list = element("dl");
  for (const [name, value] of facts) {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", value));
    list.append(tile);
  }
  const text = element("pre", undefined, "tokens");
  text.tabIndex = 0;
  shown.tokens.forEach((token, i) => text.append(tokenElement(token, i)));
  find("sample").replaceChildren(
    element("h2", shown.rollout_id), list,
    element("h3", "Prompt"), element("pre", shown.prompt), element("h3", "Response"), legend(), text,
  );
}

function tokenElement(token, i) {
  const [sampler, trainer] = [shown.sampler_logprobs[i], shown.trainer_logprobs[i]];
  const delta = sampler === null || trainer === null ? null : Math.abs(sampler - trainer);
  const made = element("span", token);
  made.title = `token ${i}: |Δ| ${number(delta)}, sampler ${number(sampler)}, trainer ${number(trainer)}, version ${shown.version_of_token[i]}`;
  if (colour === "version") made.className = `version-${shown.versions.indexOf(shown.version_of_token[i]) % SERIES}`;
  else made.className = `delta-${level(delta)}`;
  return made;
}

// One level per factor of about three, from 0.01 on; a missing number is the worst.
const LEVELS = [0.01, 0.03, 0.1, 0.3, 1];
const level = (delta) => (delta === null ? LEVELS.length : LEVELS.filter((bound) => delta >= bound).length);

function legend() {
  const made = element("p", undefined, "soft legend");
  if (colour === "version") {
    shown.versions.forEach((version, i) => made.append(element("span", `version ${version}`, `version-${i % SERIES}`), " "));
  } else {
    ["< 0.01", ...LEVELS.map((bound) => `≥ ${bound}`)].forEach((text, i) => made.append(element("span", text, `delta-${i}`), " "));
  }
  return made;
}

for (const button of document.querySelectorAll("[data-colour]")) {
  button.onclick = () => {
    colour = button.dataset.colour;
    for (const one of document.querySelectorAll("[data-colour]")) one.setAttribute("aria-pressed", String(one === button));
    if (shown) draw();
  };
}

// ↑ and ↓ walk through the list.
find("list").onkeydown = (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !heads.length) return;
  event.preventDefault();
  const at = heads.findIndex((head) => head.rollout_id === chosen());
  const next = heads[Math.min(heads.length - 1, Math.max(0, at + step))];
  location.hash = `${encodeURIComponent(job)}/${encodeURIComponent(next.rollout_id)}`;
};
find("back").href = `/#${encodeURIComponent(job)}`;
addEventListener("hashchange", show);
poll();
show();
