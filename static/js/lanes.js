// The lanes of a step: what compute, copies, host and disk do and what compute waits for. Measured where the worker measured it,
// else as predicted; each row says which. Rows are worked out here from plain data, then drawn.

import { CONFIG, axisTitle, baseLayout } from "./charts.js";
import { ink } from "./palette.js";

const LANES = ["compute", "copy_in", "copy_out", "host", "disk", "network"];
const LABELS = { compute: "compute", copy_in: "copy in", copy_out: "copy out", host: "host", disk: "disk", network: "network" };

// What the page can say now: {lengthMs, rows: [{lane, source, busy: [[begin, end]], stalls: [[begin, end, lane]]}], isSpread}.
// isSpread: when things happened is known, not only how long they took.
export function lanesOf({ timeline, samples, prediction }) {
  const measured = fromSpans(timeline) ?? fromSums(samples, "measured");
  const predicted = fromPrediction(prediction);
  if (!measured) return predicted;
  if (!predicted) return measured;
  // a card's own lanes are not seen by the worker: for those the prediction stands in, on the measured length
  const scale = measured.lengthMs / predicted.lengthMs;
  const known = new Set(measured.rows.map((row) => row.lane));
  const lent = predicted.rows.filter((row) => !known.has(row.lane) && !known.has("compute"))
    .map((row) => ({ ...row, busy: scaled(row.busy, scale), stalls: scaled(row.stalls, scale) }));
  return { ...measured, rows: inOrder([...measured.rows, ...lent]) };
}

// Share of the time that compute stood still, measured; null where nobody measured it.
export function stallShare(sample) {
  if (!sample.stall_ms) return null;
  const lengthMs = sample.step_ms ?? sample.run_ms;
  return lengthMs > 0 ? (sum(sample.stall_ms) + (sample.data_wait_ms ?? 0)) / (lengthMs + (sample.data_wait_ms ?? 0)) : null;
}

export function predictedStallShare(prediction) {
  const found = fromPrediction(prediction);
  return found ? sum(prediction.exposed_ms ?? {}) / found.lengthMs : null;
}

export function drawLanes(element, { found, unit, uirevision }) {
  const colours = ink();
  const rows = found?.rows ?? [];
  const names = rows.map((row) => `${LABELS[row.lane]}${row.source === "predicted" ? " (predicted)" : ""}`);
  const bars = { measured: emptyBars(), predicted: emptyBars(), stall: emptyBars() };
  rows.forEach((row, index) => {
    for (const [begin, end] of row.busy) put(bars[row.source], names[index], begin, end, `${names[index]}: busy ${duration(end - begin)}`);
    for (const [begin, end, lane] of row.stalls) {
      put(bars.stall, names[index], begin, end, `compute waits ${duration(end - begin)} for ${LABELS[lane]}`);
    }
  });
  const look = { line: { width: 0 } };
  const traces = [
    { ...trace("measured", bars.measured), marker: { ...look, color: colours.accent } },
    { ...trace("predicted", bars.predicted), marker: { ...look, color: colours.muted } },
    {
      ...trace("compute waits", bars.stall),
      marker: { line: { color: colours.text, width: 0.75 }, color: colours.ground, pattern: { shape: "/", fgcolor: colours.text, bgcolor: colours.ground, size: 6, solidity: 0.3 } },
    },
  ].filter(({ x }) => x.length);
  // long stretches in seconds: an axis of tens of thousands of milliseconds is hard to read
  const [scale, name] = (found?.lengthMs ?? 0) > 10_000 ? [1000, "s"] : [1, "ms"];
  for (const each of traces) each.x = each.x.map((value) => value / scale);
  for (const each of traces) each.base = each.base.map((value) => value / scale);
  const layout = baseLayout(uirevision);
  layout.barmode = "overlay";
  layout.hovermode = "closest";
  layout.showlegend = true;
  layout.legend = { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: colours.text } };
  layout.xaxis = { ...layout.xaxis, title: axisTitle(found?.isSpread ? `${name} since the ${unit} began` : `${name}, added up by lane`), range: [0, (found?.lengthMs ?? 1) / scale] };
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: [...names].reverse(), fixedrange: true };
  Plotly.react(element, traces, layout, CONFIG);
  return summary(found, unit);
}

function summary(found, unit) {
  if (!found) return "What the lanes do is not known: nothing was measured and there is no prediction.";
  const of = (row) => `${LABELS[row.lane]} ${Math.round((length(row.busy) / found.lengthMs) * 100)} % busy, ${row.source}`;
  const waits = found.rows.reduce((total, row) => total + length(row.stalls), 0);
  return `Lanes of a ${unit}: ${found.rows.map(of).join("; ")}; compute waits ${Math.round((waits / found.lengthMs) * 100)} % of the time.`;
}

// A measured step from within: compute is what is left where nothing made it stand still.
function fromSpans(timeline) {
  const spans = timeline?.spans ?? [];
  if (!spans.length || !(timeline.step_ms > 0)) return null;
  const rows = new Map();
  for (const [lane, begin, end] of spans) row(rows, lane, "measured").busy.push([begin, end]);
  const stalls = spans.filter(([, , , isStall]) => isStall);
  if (stalls.length) {
    const compute = row(rows, "compute", "measured");
    let at = 0;
    for (const [lane, begin, end] of stalls) {
      if (begin > at) compute.busy.push([at, begin]);
      if (end > at) compute.stalls.push([Math.max(begin, at), end, lane]);
      at = Math.max(at, end);
    }
    if (at < timeline.step_ms) compute.busy.push([at, timeline.step_ms]);
  }
  return { lengthMs: timeline.step_ms, rows: inOrder([...rows.values()]), isSpread: true };
}

// The latest sample's sums; of a generate job they run since its begin.
function fromSums(samples, source) {
  const last = samples.at(-1);
  if (!last?.lane_ms || !Object.keys(last.lane_ms).length) return null;
  return stacked(last.lane_ms, last.stall_ms ?? {}, last.step_ms ?? last.run_ms, source);
}

function fromPrediction(prediction) {
  if (!prediction?.lane_busy_ms?.compute) return null;
  const waits = prediction.exposed_ms ?? {};
  const lengthMs = Math.max(prediction.step_ms ?? 0, prediction.lane_busy_ms.compute + sum(waits));
  return stacked(prediction.lane_busy_ms, waits, lengthMs, "predicted");
}

function stacked(busyMs, stallMs, lengthMs, source) {
  const rows = LANES.filter((lane) => busyMs[lane] > 0).map((lane) => ({ lane, source, busy: [[0, busyMs[lane]]], stalls: [] }));
  let at = busyMs.compute ?? 0;
  for (const lane of LANES.filter((name) => stallMs[name] > 0)) {
    rows.find((each) => each.lane === "compute")?.stalls.push([at, at + stallMs[lane], lane]);
    at += stallMs[lane];
  }
  return { lengthMs, rows, isSpread: false };
}

function row(rows, lane, source) {
  if (!rows.has(lane)) rows.set(lane, { lane, source, busy: [], stalls: [] });
  return rows.get(lane);
}

function inOrder(rows) { return rows.sort((a, b) => LANES.indexOf(a.lane) - LANES.indexOf(b.lane)); }
function scaled(spans, by) { return spans.map(([begin, end, ...rest]) => [begin * by, end * by, ...rest]); }
function length(spans) { return spans.reduce((total, [begin, end]) => total + end - begin, 0); }
function sum(byLane) { return Object.values(byLane).reduce((total, value) => total + value, 0); }
function duration(ms) { return ms < 1 ? `${(ms * 1000).toFixed(0)} µs` : ms < 1000 ? `${ms.toFixed(1)} ms` : `${(ms / 1000).toFixed(2)} s`; }

function emptyBars() { return { x: [], y: [], base: [], text: [] }; }

function put(bars, name, begin, end, text) {
  bars.x.push(end - begin);
  bars.y.push(name);
  bars.base.push(begin);
  bars.text.push(text);
}

function trace(name, { x, y, base, text }) {
  return { type: "bar", orientation: "h", name, x, y, base, hovertext: text, hovertemplate: "%{hovertext}<extra></extra>", width: 0.7 };
}
