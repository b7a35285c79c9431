// The live job page: follows the one event stream, keeps what was measured, redraws at most twice a second.

import { Board } from "./board.js";
import * as charts from "./charts.js";
import { formatBytes, formatCount, formatDuration, formatFigure, signedError } from "./format.js";
import { drawLanes, lanesOf, predictedStallShare, stallShare } from "./lanes.js";
import { fetchMetrics, metrics, stream } from "./opening.js";
import { onColourChange } from "./palette.js";
import { LossView } from "./loss_view.js";
import { Series } from "./series.js";
import { drawSparks } from "./sparks.js";

const MIN_REDRAW_MS = 500;
// how long the charts wait for the first measurements before they show the prediction alone
const FIRST_DRAW_MS = 1000;
const page = document.getElementById("job-page");
const facts = JSON.parse(document.getElementById("job-facts").textContent);
const series = new Series();
const generates = ["generate", "serve"].includes(facts.job.kind);

let job = facts.job;
let memoryView = generates ? "run" : "step";
let changed = true;
let drawnAtMs = -Infinity;
let drawTimer = 0;

function foreseen() {
  return job.prediction ?? facts.job.prediction;
}

// What is measured from within is the first device's; of devices that hold different things the prediction is the fullest one's,
// so that of the first takes its place, without its course.
function ofFirstDevice(prediction) {
  const ownBytes = prediction?.rank_peak_bytes?.[0];
  return facts.devices_differ && ownBytes ? { ...prediction, device_peak_bytes: ownBytes, timeline: [] } : prediction;
}

function shared() {
  return {
    series, categories: facts.categories, prediction: ofFirstDevice(foreseen()), budgetBytes: facts.budget_bytes,
    // a generate job's points are counted in tokens, of which nobody knows how many there will be
    // one that has ended before its last step is drawn as far as it came
    numSteps: generates || job.is_terminal ? 0 : job.num_steps, unit: generates ? "token" : "step", uirevision: job.id, stallShare, lossView,
    tokensPerStep: (facts.job.spec?.workload?.sequence_length ?? 1) * (facts.job.spec?.workload?.global_batch_size ?? 1),
  };
}

// drawing

function draw() {
  drawTimer = 0;
  if (document.hidden || !changed) return;
  changed = false;
  drawnAtMs = performance.now();
  // links and the card only where there is something to show
  if (series.steps().some((sample) => Object.values(sample.copied_bytes ?? {}).some(Boolean))) document.getElementById("links-panel").hidden = false;
  if (series.steps().some((sample) => sample.gpu)) document.getElementById("card-panel").hidden = false;
  // nor the host's memory where nothing of the run is there
  const prediction = shared().prediction;
  const usesHost = prediction?.host_peak_bytes || series.steps().some((sample) => sample.host_bytes);
  // nothing comes any more: empty charts are not drawn
  const isOver = job.is_terminal && !series.steps().length;
  const isTimed = !job.is_terminal || series.steps().some((sample) => Number.isFinite(sample.tokens_per_s));
  const isEmpty = { "host-panel": !usesHost, "lanes-panel": !hasStalls(), "speed-panel": !isTimed };
  for (const panel of document.querySelectorAll("[data-needs-measurements]")) panel.hidden = isOver || Boolean(isEmpty[panel.id]);
  document.getElementById("never-measured").hidden = !isOver;
  board.show(shared());
  showFigures();
  page.dataset.points = String(series.steps().length);
  page.dataset.draws = String(Number(page.dataset.draws ?? 0) + 1);
}

const lossView = generates ? null : new LossView(() => { drawnAtMs = -Infinity; scheduleDraw(); });
const board = new Board([
  { id: "chart-memory", draw: (element, data) => (memoryView === "run" ? charts.drawMemoryOverRun : charts.drawMemoryWithinStep)(element, data) },
  { id: "chart-host", draw: charts.drawHostBytes },
  ...(generates ? [] : [{ id: "chart-loss", draw: charts.drawLoss }, { id: "chart-strip", draw: charts.drawMemoryStrip }]),
  { id: "chart-speed", draw: charts.drawSpeed },
  ...(facts.job.kind === "serve" ? [] : [{ id: "chart-lanes", draw: drawLanesNow }]),
  { id: "chart-links", draw: charts.drawLinks },
  { id: "chart-card", draw: charts.drawCard },
]);

function drawLanesNow(element, { prediction, uirevision }) {
  const found = lanesOf({ timeline: series.latestTimeline(), samples: series.steps(), prediction });
  return drawLanes(element, { found, unit: generates ? "pass" : "step", uirevision });
}

function scheduleDraw() {
  changed = true;
  if (drawTimer || document.hidden) return;
  drawTimer = setTimeout(draw, Math.max(0, drawnAtMs + MIN_REDRAW_MS - performance.now()));
}

function show(name, text) {
  for (const element of page.querySelectorAll(`[data-live="${name}"]`)) {
    if (element.textContent !== text) element.textContent = text;
  }
}

// one full bar of compute says nothing
function hasStalls() {
  return predictedStallShare(shared().prediction) > 0 || series.steps().some((sample) => stallShare(sample) > 0);
}

function showFigures() {
  const last = series.latestStep();
  drawSparks(page, series.steps());
  if (last) {
    const ranksPeak = facts.devices_differ ? job.summary?.device_peak_bytes ?? 0 : 0;
    const peakBytes = Math.max(series.peakBytes(), ranksPeak);
    const prediction = foreseen();
    show("peak", formatBytes(peakBytes));
    if (prediction) show("error", signedError(prediction.device_peak_bytes, peakBytes));
    if (Number.isFinite(last.loss)) show("loss", formatFigure(last.loss));
    // of a finished run the server's figure stays: that of the whole run, as lists and comparisons show it
    if (Number.isFinite(last.tokens_per_s) && !job.is_terminal) show("speed", formatCount(last.tokens_per_s));
    if (Number.isFinite(last.step_ms) && !job.is_terminal) show("step-ms", `${formatFigure(last.step_ms)} ms`);
    if (last.time_s && job.started_at && !job.is_terminal) show("took", formatDuration(Math.max(0, last.time_s - Date.parse(job.started_at) / 1000)));
    if (last.num_errors != null) show("errors", formatCount(last.num_errors));
    if (last.host_bytes != null) show("host", formatBytes(last.host_bytes));
    if (last.gpu) show("card", charts.cardWords(last.gpu));
    show("stalls", stallWords(last, prediction));
    for (const { key } of facts.categories) show(`now-${key}`, formatBytes(last.device_bytes?.[key] ?? 0));
  }
  const validated = series.evals().at(-1);
  if (Number.isFinite(validated?.validation_loss)) show("validation-loss", formatFigure(validated.validation_loss));
  const reached = (generates ? last?.prompts_done : last?.step) ?? 0;
  showProgress(Math.max(job.step, job.is_terminal ? 0 : reached));
}

function stallWords(sample, prediction) {
  const measured = stallShare(sample);
  const predicted = predictedStallShare(prediction);
  const percent = (share) => `${Math.round(share * 100)} %`;
  if (measured == null) return predicted == null ? "" : `compute waits ${percent(predicted)} of the time, as predicted; not measured here`;
  return `compute waits ${percent(measured)} of the time${predicted == null ? "" : `, predicted ${percent(predicted)}`}`;
}

function showProgress(step) {
  show("step", formatCount(step));
  const seconds = secondsLeft();
  if (seconds != null && job.state === "running") {
    show("eta", `${formatDuration(seconds)} left`);
    show("left", formatDuration(seconds));
  }
  const percent = job.num_steps ? `${Math.floor((100 * step) / job.num_steps)} % · ` : "";
  document.title = `${job.is_terminal ? "" : percent}${job.name ?? facts.job.name} · Headroom`;
  const bar = document.getElementById("job-progress");
  if (bar) bar.value = step;
}

// From the pace of the last steps: the row's own estimate comes only with a change of state.
function secondsLeft() {
  if (generates) return secondsLeftOfPrompts();
  const times = series.steps().slice(-20).map((sample) => sample.step_ms).filter(Number.isFinite).sort((a, b) => a - b);
  if (!times.length) return job.eta_s;
  return ((job.num_steps - series.latestStep().step) * times[Math.floor(times.length / 2)]) / 1000;
}

// Prompts end pass by pass: from the first point of this attempt to the last.
function secondsLeftOfPrompts() {
  const last = series.latestStep();
  const first = series.steps().find((sample) => sample.attempt === last?.attempt);
  const done = last ? last.prompts_done - first.prompts_done : 0;
  if (!(done > 0)) return job.eta_s;
  return ((last.num_prompts - last.prompts_done) * (last.time_s - first.time_s)) / done;
}

// what arrives

// The charts over the run draw a generate job's points as they draw steps.
function asStep(sample) {
  return sample.kind === "generate" ? { ...sample, kind: "step" } : sample;
}

function takeState(next) {
  const before = job;
  job = { ...job, ...next };
  const moved = ["state", "phase", "paused", "cancel_requested", "attempt", "message"].some((key) => before[key] !== job[key]);
  if (!moved) return;
  if (before.state !== job.state || before.phase !== job.phase) announce();
  refreshHead();
  if (before.state !== job.state) refreshTab(["plan", "checkpoints", "samples", "events", "files"]);
  else refreshTab(["events"]);
}

function takeMetrics({ steps = [], evals = [], generated = [], timeline = null, timelines = [] }) {
  const samples = [
    ...generated.map((sample) => asStep({ kind: "generate", ...sample })),
    ...steps.map((sample) => ({ kind: "step", ...sample })),
    ...evals.map((sample) => ({ kind: "eval", ...sample })),
    ...timelines.map((sample) => ({ kind: "timeline", ...sample })),
  ];
  if (timeline?.points) samples.push({ kind: "timeline", ...timeline });
  if (series.addAll(samples)) scheduleDraw();
}

const takers = {
  snapshot(data) { takeState(data.job ?? {}); takeMetrics(data.metrics ?? data); scheduleDraw(); },
  sample(data) { if (series.add(asStep(data))) scheduleDraw(); },
  state(data) { takeState(data); scheduleDraw(); },
  log() {}, // the log follows its file
  checkpoint() { refreshTab(["checkpoints"]); },
  gap() { catchUp(); },
  reset() { catchUp(); },
  done() {
    stream.close();
    refreshHead();
    refreshTab(["plan", "checkpoints", "samples", "events", "files"]);
    catchUp();
  },
};

async function catchUp() {
  takeMetrics(await fetchMetrics());
}

// parts that the server renders

const WAIT_MS = 300;
let headTimer = 0;
let tabTimer = 0;
const tabsMoved = new Set();

// several moves often come together; one request shows them all
function refreshHead() {
  headTimer ||= setTimeout(() => {
    headTimer = 0;
    htmx.ajax("GET", page.dataset.headUrl, { target: "#job-head", swap: "outerHTML" });
  }, WAIT_MS);
}

// Asked for once no tab is being opened, and then of whichever is open: nobody's tab is taken away.
function refreshTab(names) {
  for (const name of names) tabsMoved.add(name);
  tabTimer ||= setTimeout(() => {
    tabTimer = 0;
    const panel = document.getElementById("tab-panel");
    if (panel.querySelector("nav .htmx-request")) return refreshTab([]);
    if (tabsMoved.has(panel.dataset.tab)) htmx.trigger(panel, "refresh");
    tabsMoved.clear();
  }, WAIT_MS);
}

function announce() {
  const words = { succeeded: "finished", cancelled: "stopped" }[job.state] ?? job.state;
  document.getElementById("job-status").textContent = `Job ${words}${job.phase && !job.is_terminal ? `: ${job.phase}` : ""}.`;
}

function showConnection(state, since) {
  const clock = since.toLocaleTimeString("en-GB");
  const text = { live: `live since ${clock}`, reconnecting: `waiting for the server since ${clock}`, ended: "" }[state];
  show("connection", text);
  page.dataset.connection = state;
}

// wiring

for (const button of document.querySelectorAll("[data-memory-view]")) {
  button.addEventListener("click", () => {
    memoryView = button.dataset.memoryView;
    for (const other of document.querySelectorAll("[data-memory-view]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    for (const twin of document.querySelectorAll("[data-twin-of]")) twin.hidden = twin.dataset.twinOf !== memoryView;
    drawnAtMs = -Infinity;
    scheduleDraw();
  });
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && changed) scheduleDraw(); });
document.body.addEventListener("htmx:afterSettle", () => {
  const execution = document.getElementById("execution");
  const isSeen = document.getElementById("tab-panel").dataset.tab === "execution";
  if (execution.hidden === isSeen) {
    execution.hidden = !isSeen;
    drawnAtMs = -Infinity;
    scheduleDraw();
  }
  showFigures();
});
onColourChange(scheduleDraw);

// pictures that the server drew show more than the prediction, so they stay until there is more
setTimeout(() => { if (drawnAtMs < 0 && !page.querySelector(".picture")) scheduleDraw(); }, FIRST_DRAW_MS);
if (stream) {
  stream.listen({ onEvent: (type, data) => takers[type](data), onConnection: showConnection });
} else {
  takeMetrics(await metrics);
  scheduleDraw();
  showConnection("ended", new Date());
}
