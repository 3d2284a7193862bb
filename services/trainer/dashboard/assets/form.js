// The form for a new job: a preset, its most used keys as inputs, and the document they are part of.
// What the trainer refuses stands beside the key that it is about.

const FIELDS = ["name", "steps", "seed", "model.rollout_checkpoint", "data.path", "sampling.groups_per_step", "sampling.samples_per_prompt", "sampling.max_response_tokens", "actor.optimizer.learning_rate"];
const find = (id) => document.getElementById(id);
let presets = [];

export async function openForm(submitted) {
  const trouble = presets.length ? "" : await loadPresets();
  find("preset").replaceChildren(...presets.map((preset) => new Option(preset.name, preset.name)));
  find("preset").value = presets.some((preset) => preset.name === "demo") ? "demo" : presets[0]?.name;
  find("preset").onchange = takePreset;
  find("document").oninput = () => { showErrors([]); fromDocument(); };
  find("submit").onclick = () => submit(submitted);
  find("close").onclick = () => find("form").close();
  takePreset();
  if (trouble) showErrors([{ message: trouble }]);
  find("form").showModal();
}

// Without them a document can be written all the same.
async function loadPresets() {
  try {
    const answer = await fetch("/v1/presets", { signal: AbortSignal.timeout(10000) });
    if (!answer.ok) return `the trainer has no presets to start from: ${answer.status}`;
    presets = (await answer.json()).presets;
    return "";
  } catch (err) {
    return `the trainer does not answer: ${err.message}`;
  }
}

function takePreset() {
  const preset = presets.find((one) => one.name === find("preset").value);
  find("document").value = JSON.stringify(preset?.document ?? {}, null, 2);
  showErrors([]);
  fromDocument();
}

function parsed() {
  try { return JSON.parse(find("document").value); } catch { return null; }
}

// Inputs show what the document says; they are made anew, as the document may be another one.
function fromDocument() {
  const job = parsed();
  if (job === null) return;
  find("fields").replaceChildren(...FIELDS.map((key) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    const value = key.split(".").reduce((part, name) => part?.[name], job);
    input.name = key;
    input.value = value ?? "";
    input.placeholder = "default";
    input.oninput = () => change(key, input.value);
    const error = document.createElement("small");
    error.className = "field-error";
    error.id = `error-${key}`;
    input.setAttribute("aria-describedby", error.id);
    label.append(key, input, error);
    return label;
  }));
}

function change(key, text) {
  const job = parsed();
  if (job === null) return;
  const names = key.split("."), last = names.pop();
  const part = names.reduce((inner, name) => (inner[name] ??= {}), job);
  if (text === "") delete part[last];
  else part[last] = text.trim() !== "" && Number.isFinite(Number(text)) && key !== "name" ? Number(text) : text;
  find("document").value = JSON.stringify(job, null, 2);
}

async function submit(submitted) {
  let body;
  try { body = JSON.stringify(JSON.parse(find("document").value)); } catch (err) { return showErrors([{ message: `no JSON: ${err.message}` }]); }
  const answer = await fetch("/v1/jobs", {
    method: "POST", body, headers: { "Content-Type": "application/json" }, signal: AbortSignal.timeout(60000),
  }).catch((err) => ({ ok: false, json: async () => ({ detail: `the trainer does not answer: ${err.message}` }) }));
  const told = await answer.json();
  if (!answer.ok) return showErrors(Array.isArray(told.detail) ? told.detail : [{ message: String(told.detail) }]);
  find("form").close();
  submitted(told.job_id);
}

// An error of a key that has an input stands there, all others in the list; each once.
function showErrors(errors) {
  const inputs = [...find("fields").querySelectorAll("input")];
  for (const input of inputs) {
    const found = errors.find((error) => error.key === input.name);
    input.setAttribute("aria-invalid", String(Boolean(found)));
    input.nextSibling.textContent = found ? sentence(found) : "";
  }
  inputs.find((input) => input.getAttribute("aria-invalid") === "true")?.focus();
  const others = errors.filter((error) => !inputs.some((input) => input.name === error.key));
  find("form-errors").replaceChildren(...others.map((error) => {
    const item = document.createElement("li");
    item.textContent = (error.key ? `${error.key}: ` : "") + sentence(error);
    return item;
  }));
}

function sentence(error) {
  const allowed = Array.isArray(error.allowed) ? error.allowed.join(", ") : error.allowed;
  return error.message + (allowed ? ` (allowed: ${allowed})` : "");
}
