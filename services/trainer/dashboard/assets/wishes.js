// Pause, resume and cancel of the shown job, each asked for twice: by its button and in a dialog.

const find = (id) => document.getElementById(id);
const WISHES = {
  pause: { of: (job) => job.state === "queued" || (job.state === "running" && !job.wish),
    what: "The step in progress is taken first; then the job waits until it is resumed. Nothing is lost." },
  resume: { of: (job) => job.state === "paused" || job.state === "failed" || (job.state === "running" && job.wish === "pause"),
    what: "The job goes on after its last step. If another one runs, it waits for its turn." },
  cancel: { of: (job) => ["queued", "paused"].includes(job.state) || (job.state === "running" && job.wish !== "cancel"),
    what: "The job ends for good: it cannot be resumed. Its run folder, checkpoints and report stay." },
};

let shown = null;

// `asked` is called when the trainer has taken a wish.
export function setUpWishes(asked) {
  for (const wish of Object.keys(WISHES)) find(wish).onclick = () => confirm(wish, asked);
  find("keep").onclick = () => find("confirm").close();
}

// Buttons stay in place, so that one under the finger or with the focus does not go away.
export function drawWishes(job) {
  shown = job;
  for (const [wish, { of }] of Object.entries(WISHES)) find(wish).hidden = !of(job);
  find("wish").textContent = { pause: "pauses after this step", cancel: "is being cancelled" }[job.wish] ?? "";
}

function confirm(wish, asked) {
  const { job_id: id } = shown;
  find("confirm-title").textContent = `${wish} ${id}?`;
  find("confirm-what").textContent = WISHES[wish].what;
  find("confirm-error").textContent = "";
  find("do").textContent = `${wish} the job`;
  find("do").className = wish === "cancel" ? "danger" : "";
  find("do").disabled = false;
  find("do").onclick = () => ask(wish, id, asked);
  find("confirm").showModal();
}

async function ask(wish, id, asked) {
  find("do").disabled = true;
  const answer = await fetch(`/v1/jobs/${encodeURIComponent(id)}/${wish}`, { method: "POST", signal: AbortSignal.timeout(60000) })
    .catch((err) => ({ ok: false, json: async () => ({ detail: `the trainer does not answer: ${err.message}` }) }));
  if (answer.ok) {
    find("confirm").close();
    return asked();
  }
  find("confirm-error").textContent = String((await answer.json()).detail);
  find("do").disabled = false;
}
