// Runs side by side: one curve for each, over steps or over minutes, and one line through all outcomes.

import { Board } from "./board.js";
import { CONFIG, axisTitle, baseLayout } from "./charts.js";
import { axisUnit, formatBytes, formatCount, formatDuration, formatFigure } from "./format.js";
import { onColourChange, runStyle } from "./palette.js";

const facts = JSON.parse(document.getElementById("compare-facts").textContent);
const status = document.getElementById("compare-status");
const runs = facts.runs.map((run, index) => ({ ...run, index, steps: [] }));
let over = "step";
let reach = "whole";

const WRITERS = {
  bytes: formatBytes,
  ms: (value) => (value < 1000 ? `${formatFigure(value)} ms` : `${formatFigure(value / 1000)} s`),
  s: formatDuration,
  per_s: formatCount,
  number: formatFigure,
};

function abscissa(run) {
  if (over === "step") return run.steps.map((sample) => sample.step);
  const start = run.steps[0]?.time_s ?? 0;
  return run.steps.map((sample) => (sample.time_s - start) / 60);
}

// The points of a run and where they are drawn, whole or as far as the shortest run came.
function pointsOf(run, end) {
  const x = abscissa(run);
  const count = x.findLastIndex((at) => at <= end) + 1;
  return { x: x.slice(0, count), steps: run.steps.slice(0, count) };
}

// One chart of a field of the samples.
function drawField(element, field, { title, unit, write, label }) {
  const drawn = runs.filter((run) => run.steps.length);
  const end = reach === "shared" ? Math.min(...drawn.map((run) => abscissa(run).at(-1))) : Infinity;
  const traces = drawn.map((run) => {
    const { x, steps } = pointsOf(run, end);
    return {
      type: "scatter",
      mode: steps.length < 2 ? "markers" : "lines",
      name: run.letter,
      x,
      y: steps.map((sample) => (Number.isFinite(sample[field]) ? sample[field] / unit : null)),
      text: steps.map((sample) => (Number.isFinite(sample[field]) ? write(sample[field]) : "")),
      hovertemplate: `${run.letter}: %{text}<extra></extra>`,
      line: runStyle(run.index),
    };
  });
  const layout = baseLayout(`compare-${field}-${over}-${reach}`);
  layout.margin = { ...layout.margin, r: 32 };
  layout.xaxis = { ...layout.xaxis, title: axisTitle(over === "step" ? "step" : "minutes since the first step") };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(title), rangemode: field === "loss" ? "normal" : "tozero" };
  layout.annotations = traces.map((trace, index) => ({
    x: trace.x.at(-1), y: trace.y.at(-1), text: trace.name, showarrow: false, xanchor: "left", xshift: 4,
    font: { color: runStyle(drawn[index].index).color, size: 13 },
  }));
  Plotly.react(element, traces, layout, CONFIG);
  const last = drawn.map((run) => [run.letter, run.steps.at(-1)[field]]).filter(([, value]) => Number.isFinite(value));
  return last.length
    ? `${label}: ${last.map(([letter, value]) => `run ${letter} at ${write(value)}`).join(", ")}.`
    : `${label}; no measurement yet`;
}

// Each outcome is an axis of its own, from its lowest to its highest value.
function drawAll(element) {
  const axes = [...facts.settings, ...facts.outcomes].filter(({ values }) => new Set(values.filter(Number.isFinite)).size > 1);
  if (!axes.length) {
    element.textContent = "No number differs yet.";
    element.classList.add("none-yet");
    return element.textContent;
  }
  const ranges = axes.map(({ values }) => {
    const known = values.filter(Number.isFinite);
    return [Math.min(...known), Math.max(...known)];
  });
  const share = (value, [low, high]) => (Number.isFinite(value) ? (value - low) / (high - low) : null);
  const traces = runs.map((run) => ({
    type: "scatter",
    mode: "lines+markers",
    name: run.letter,
    x: axes.map((_, index) => index),
    y: axes.map(({ values }, index) => share(values[run.index], ranges[index])),
    text: axes.map(({ name, unit, values }) => (Number.isFinite(values[run.index]) ? `${name} ${WRITERS[unit](values[run.index])}` : "")),
    hovertemplate: `${run.letter}: %{text}<extra></extra>`,
    line: runStyle(run.index),
    marker: { size: 8 },
  }));
  const layout = baseLayout("compare-all");
  layout.hovermode = "closest";
  // names that stand aslant begin left of their axes
  layout.margin = { ...layout.margin, l: element.clientWidth < 112 * axes.length ? 96 : 48, r: 40, t: 32 };
  layout.xaxis = {
    ...layout.xaxis, tickmode: "array", tickvals: axes.map((_, index) => index), ticktext: axes.map(({ name }) => axisName(name)), tickangle: "auto", autotickangles: [0, -30, -60],
    range: [-0.25, axes.length - 0.75], fixedrange: true,
  };
  layout.yaxis = { ...layout.yaxis, showticklabels: false, zeroline: false, range: [-0.12, 1.12], fixedrange: true };
  layout.annotations = axes.flatMap(({ unit }, index) => ranges[index].map((value, end) => ({
    x: index, y: end, yshift: end ? 14 : -14, text: WRITERS[unit](value), showarrow: false, font: { size: 12 },
  })));
  layout.annotations.push(...ends(axes, share, ranges));
  Plotly.react(element, traces, layout, CONFIG);
  return "Each run as a line through its settings and outcomes; the tables below have the numbers";
}

// The letters of the runs, at the last axis on which each has a value; runs that end in one point share a place.
function ends(axes, share, ranges) {
  const letters = new Map();
  for (const run of runs) {
    const at = axes.findLastIndex(({ values }) => Number.isFinite(values[run.index]));
    if (at < 0) continue;
    const y = share(axes[at].values[run.index], ranges[at]);
    const key = `${at} ${y.toFixed(2)}`;
    if (letters.has(key)) letters.get(key).runs.push(run);
    else letters.set(key, { at, y, runs: [run] });
  }
  return [...letters.values()].map(({ at, y, runs: same }) => ({
    x: at, y, xanchor: "left", xshift: 8, showarrow: false, text: same.map(({ letter }) => letter).join(" "),
    font: { color: runStyle(same[0].index).color, size: 13 },
  }));
}

// ``workload.sequence_length`` and ``batch, lifetime`` as people read them, short.
function axisName(name) {
  return name.split(".").at(-1).replace(/_bytes$/, "").replace(/^num_/, "").replaceAll("_", " ");
}

function drawMemory(element, { unit }) {
  return drawField(element, "device_peak_bytes", { title: unit.name, unit: unit.bytes, write: formatBytes, label: "Device memory at the peak" });
}

const board = new Board([
  ...(document.getElementById("compare-loss") ? [{ id: "compare-loss", draw: (element) => drawField(element, "loss", { title: "loss", unit: 1, write: formatFigure, label: "Training loss" }) }] : []),
  { id: "compare-memory", draw: drawMemory },
  { id: "compare-speed", draw: (element) => drawField(element, "tokens_per_s", { title: "tokens per second", unit: 1, write: formatCount, label: "Tokens per second" }) },
  // two runs differ in the tables below; lines between two ends of each axis would say no more
  ...(document.getElementById("compare-all") ? [{ id: "compare-all", draw: drawAll }] : []),
]);

function draw() {
  const highest = runs.reduce((most, run) => run.steps.reduce((peak, sample) => Math.max(peak, sample.device_peak_bytes ?? 0), most), 1);
  board.show({ unit: axisUnit(highest) });
}

async function load(run) {
  const answer = await fetch(run.metrics, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${run.letter} (${answer.status})`);
  const { steps, generated } = await answer.json();
  run.steps = steps.length ? steps : generated;
}

function choose(name, take) {
  const buttons = document.querySelectorAll(`[data-${name}]`);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      take(button.dataset[name]);
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
}

choose("over", (chosen) => { over = chosen; });
choose("reach", (chosen) => { reach = chosen; });

const loaded = await Promise.allSettled(runs.map(load));
const failed = loaded.filter(({ status: outcome }) => outcome === "rejected").map(({ reason }) => reason.message);
const numPoints = runs.reduce((sum, run) => sum + run.steps.length, 0);
status.textContent = failed.length
  ? `The server did not give the measurements of run ${failed.join(", ")}; reload the page to try again.`
  : `${formatCount(numPoints)} points of ${runs.length} runs.`;
document.getElementById("compare-reach").hidden = new Set(runs.map((run) => run.steps.at(-1)?.step).filter(Boolean)).size < 2;
draw();
onColourChange(draw);
