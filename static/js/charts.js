// The charts of the job page. Each function draws one chart from plain data and returns its summary in words; none keeps state.

import { axisUnit, formatBytes, formatCount, formatFigure } from "./format.js";
import { fill, ink } from "./palette.js";
import { thin } from "./series.js";

export const CONFIG = {
  showSendToCloud: false,
  plotlyServerURL: "",
  displaylogo: false,
  responsive: true,
  displayModeBar: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d"],
};

const MAX_POINTS = 2000;

// Device bytes at each step's peak, stacked by category, against the prediction and the budget.
export function drawMemoryOverRun(element, { series, categories, prediction, budgetBytes, numSteps, unit: point, uirevision }) {
  const measured = thin(series.steps(), MAX_POINTS, (sample) => sample.device_peak_bytes ?? 0);
  // what is known of one moment alone is drawn up to there: an area has no width at a point
  const samples = measured.length === 1 ? [{ ...measured[0], step: 0 }, measured[0]] : measured;
  const steps = samples.map((sample) => sample.step);
  const highest = topOf({ usedBytes: Math.max(series.peakBytes(), prediction?.device_peak_bytes ?? 0), budgetBytes });
  const unit = axisUnit(highest);
  const end = Math.max(numSteps, steps.at(-1) ?? 0, 1);
  const traces = stack(samples.map((sample) => sample.device_bytes ?? {}), steps, categories, unit, "linear", `${point} %{x}`);
  if (prediction) traces.push(predictionTrace([0, end], [prediction.device_peak_bytes, prediction.device_peak_bytes], unit, `${point} %{x}`));
  if (budgetBytes <= highest) traces.push(budgetTrace([0, end], budgetBytes, unit));
  const layout = memoryLayout({ unit, highest, budgetBytes, uirevision: `${uirevision}-run` });
  layout.xaxis = { ...layout.xaxis, title: axisTitle(point), range: [0, end], showticklabels: samples.length > 0 || numSteps > 0 };
  Plotly.react(element, traces, layout, CONFIG);
  return memorySummary({ peakBytes: series.peakBytes(), prediction, budgetBytes, over: numSteps ? `${measured.length} points of ${numSteps} steps` : `${measured.length} points` });
}

// Device bytes within the latest measured step, the predicted step laid over it; both as percent of their own length.
export function drawMemoryWithinStep(element, { series, categories, prediction, budgetBytes, uirevision }) {
  const record = series.latestTimeline();
  const measured = record?.points ?? [];
  const length = Math.max(measured.at(-1)?.[0] ?? 0, 1e-9);
  const x = measured.map(([offsetMs]) => (offsetMs / length) * 100);
  const bytes = measured.map(([, byCategory]) => byCategory);
  const highest = topOf({ usedBytes: Math.max(...bytes.map(total), prediction?.device_peak_bytes ?? 0, 1), budgetBytes });
  const unit = axisUnit(highest);
  const traces = stack(bytes, x, categories, unit, "hv", `%{customdata:.1f} ms`, measured.map(([offsetMs]) => offsetMs));
  const predicted = prediction?.timeline ?? [];
  if (predicted.length) {
    const predictedLength = Math.max(predicted.at(-1).offset_ms, 1e-9);
    traces.push(predictionTrace(
      predicted.map((point) => (point.offset_ms / predictedLength) * 100),
      predicted.map((point) => total(point.bytes_by_category)), unit, "%{text}", "hv",
      predicted.map((point) => `${point.phase}, ${point.offset_ms.toFixed(1)} ms`),
    ));
  }
  if (budgetBytes <= highest) traces.push(budgetTrace([0, 100], budgetBytes, unit));
  const layout = memoryLayout({ unit, highest, budgetBytes, uirevision: `${uirevision}-step` });
  layout.xaxis = { ...layout.xaxis, title: axisTitle("percent of the step"), range: [0, 100] };
  Plotly.react(element, traces, layout, CONFIG);
  const peakBytes = Math.max(0, ...bytes.map(total));
  return record
    ? memorySummary({ peakBytes, prediction, budgetBytes, over: `step ${record.step}, ${measured.length} moments` })
    : "No step has been measured from within yet; the dashed line is the prediction.";
}

export function drawHostBytes(element, { series, prediction, unit: point, uirevision }) {
  const samples = thin(series.steps(), MAX_POINTS, (sample) => sample.host_bytes ?? 0).filter((sample) => sample.host_bytes != null);
  // at least 1 MiB, so that an axis of nothing but zeros is not labelled in millionths
  const highest = Math.max(1024 * 1024, prediction?.host_peak_bytes ?? 0, ...samples.map((sample) => sample.host_bytes));
  const unit = axisUnit(highest);
  const colours = ink();
  const traces = [{
    type: "scatter", mode: "lines", name: "host bytes", x: samples.map((s) => s.step), y: samples.map((s) => s.host_bytes / unit.bytes),
    text: samples.map((s) => formatBytes(s.host_bytes)), line: { color: colours.accent, width: 2 }, hovertemplate: `${point} %{x}: %{text}<extra></extra>`,
  }];
  const layout = baseLayout(uirevision);
  layout.yaxis = { ...layout.yaxis, title: axisTitle(unit.name), range: [0, (highest / unit.bytes) * 1.1] };
  layout.margin = { ...layout.margin, t: 4 };
  Plotly.react(element, traces, layout, CONFIG);
  const last = samples.at(-1);
  return last ? `Host memory is at ${formatBytes(last.host_bytes)} at ${point} ${last.step}.` : "No host memory measured yet.";
}

// Training loss as it was (faint where it is smoothed) and smoothed, validation loss, and the learning rate. view: a LossView.
export function drawLoss(element, { series, numSteps, uirevision, lossView: view, tokensPerStep }) {
  const samples = thin(series.steps().filter((s) => Number.isFinite(s.loss)), MAX_POINTS, (sample) => sample.loss);
  const evals = series.evals().filter((sample) => Number.isFinite(sample.validation_loss));
  const colours = ink();
  const scale = { tokensPerStep, startS: samples[0]?.time_s ?? 0 };
  const x = view.positions(samples, scale);
  const losses = samples.map((sample) => sample.loss);
  const isSmooth = view.smoothing > 0 && samples.length > 1;
  const training = (name, y, opacity) => ({
    type: "scatter", name, x, y, opacity, mode: samples.length < 2 ? "markers" : "lines", customdata: samples.map((s) => s.step),
    line: { color: colours.accent, width: opacity < 1 ? 1 : 1.5 }, hovertemplate: `step %{customdata}: ${name} %{y:.4f}<extra></extra>`,
  });
  const traces = [
    ...(isSmooth ? [{ ...training("as measured", losses, 0.35), showlegend: false }] : []),
    training("training", isSmooth ? view.smoothed(losses) : losses, 1),
    {
      ...line("validation", evals, (s) => s.validation_loss), x: view.positions(evals, scale), mode: "lines+markers",
      line: { color: colours.text, width: 1.5, dash: "dot" }, marker: { symbol: "diamond", size: 8, color: colours.text },
      hovertemplate: "validation %{y:.4f}<extra></extra>",
    },
    {
      ...line("learning rate", samples, (s) => s.learning_rate), x, yaxis: "y2",
      line: { color: colours.muted, width: 1.5, dash: "dash" }, hovertemplate: "learning rate %{y:.3~g}<extra></extra>",
    },
  ];
  const layout = withLegend(baseLayout(`${uirevision}-${view.over}-${view.scale}`));
  const end = view.over === "steps" ? Math.max(numSteps, x.at(-1) ?? 0, 1) : x.at(-1) ?? 1;
  layout.xaxis = { ...layout.xaxis, title: axisTitle(view.unit), range: view.zoom ?? [0, end] };
  if (view.scale === "log") layout.yaxis = { ...layout.yaxis, type: "log" };
  layout.yaxis2 = { ...rightAxis(layout, { tickformat: ".1~e", rangemode: "tozero" }), type: "linear" };
  if (!samples.length && !evals.length) {
    layout.yaxis.showticklabels = false; // numbers of nothing
    layout.yaxis2.visible = false;
  }
  const isNew = !element.data;
  Plotly.react(element, traces, layout, CONFIG);
  if (isNew) view.follow(element);
  const last = samples.at(-1);
  if (!last) return "No loss measured yet.";
  const validation = evals.length ? `, validation ${formatFigure(evals[0].validation_loss)} to ${formatFigure(evals.at(-1).validation_loss)}` : "";
  return `Training loss went from ${formatFigure(samples[0].loss)} to ${formatFigure(last.loss)} by step ${last.step}${validation}; the learning rate is at ${formatFigure(last.learning_rate ?? 0)}.`;
}

// The whole run's device memory, 60 pixels high: the same areas as over the run, without labels.
export function drawMemoryStrip(element, data) {
  const summary = drawMemoryOverRun(element, data);
  Plotly.relayout(element, {
    margin: { l: 56, r: 8, t: 4, b: 4 }, annotations: [], "xaxis.title.text": "", "xaxis.showticklabels": false,
    "yaxis.title.text": "", "yaxis.nticks": 2, "yaxis.automargin": false, hovermode: "x",
  });
  return summary.replace("Device memory over", "The run's strip:");
}

// Beside the tokens what part of the time compute stood still (stallShare of a sample, or null), where that was measured.
export function drawSpeed(element, { series, prediction, numSteps, unit: point, uirevision, stallShare }) {
  const samples = thin(series.steps().filter((s) => Number.isFinite(s.tokens_per_s)), MAX_POINTS, (sample) => -sample.tokens_per_s);
  const colours = ink();
  const end = Math.max(numSteps, samples.at(-1)?.step ?? 0, 1);
  const traces = [{
    ...line("measured", samples, (s) => s.tokens_per_s), mode: samples.length < 2 ? "markers" : "lines",
    line: { color: colours.accent, width: 1.5 }, customdata: samples.map((s) => s.step_ms),
    hovertemplate: point === "step" ? "step %{x}: %{y:,.0f} tokens/s, %{customdata:,.0f} ms<extra></extra>" : "token %{x}: %{y:,.0f} tokens/s<extra></extra>",
  }];
  if (prediction) {
    traces.push({
      type: "scatter", mode: "lines", name: "predicted", x: [0, end], y: [prediction.tokens_per_s, prediction.tokens_per_s],
      line: { color: colours.text, width: 1.5, dash: "dash" }, hovertemplate: "predicted %{y:,.0f} tokens/s<extra></extra>",
    });
  }
  const layout = withLegend(baseLayout(uirevision));
  layout.xaxis = { ...layout.xaxis, title: axisTitle(point), range: [0, end] };
  layout.yaxis = { ...layout.yaxis, rangemode: "tozero", tickformat: ",~s" };
  const stalled = samples.filter((sample) => stallShare(sample) != null);
  if (stalled.length) {
    traces.push({
      ...line("stalls", stalled, (s) => stallShare(s) * 100), yaxis: "y2", fill: "tozeroy", fillcolor: "#00000000",
      line: { color: colours.warn, width: 1.5, dash: "dot" }, hovertemplate: `${point} %{x}: compute waits %{y:.1f} % of the time<extra></extra>`,
    });
    layout.yaxis2 = rightAxis(layout, { range: [0, 100], ticksuffix: " %" });
  }
  Plotly.react(element, traces, layout, CONFIG);
  const last = samples.at(-1);
  if (!last) return "No speed measured yet.";
  const waits = stallShare(last) == null ? "" : `, compute waits ${Math.round(stallShare(last) * 100)} % of the time`;
  return `${formatCount(last.tokens_per_s)} tokens per second at ${point} ${last.step}${waits}.`;
}

const LINK_NAMES = {
  device_to_host: "device to host", host_to_device: "host to device", host_to_disk: "to disk", disk_to_host: "from disk",
  host_to_remote: "to remote store", remote_to_host: "from remote store",
};
const DASHES = ["solid", "dot", "dashdot", "longdash", "longdashdot", "dash"];

// Bytes per second over each link between two points (rates of series.js), against what the prediction comes to.
export function drawLinks(element, { series, prediction, numSteps, unit: point, uirevision }) {
  const rates = thin(series.linkRates(), MAX_POINTS, (rate) => Math.max(0, ...Object.values(rate.bytesPerS)));
  const links = Object.keys(LINK_NAMES).filter((link) => rates.some((rate) => rate.bytesPerS[link] > 0));
  const predicted = predictedRates(prediction);
  const highest = Math.max(1024 * 1024, ...rates.flatMap((rate) => Object.values(rate.bytesPerS)), ...links.map((link) => predicted[link] ?? 0));
  const unit = axisUnit(highest);
  const end = Math.max(numSteps, rates.at(-1)?.step ?? 0, 1);
  const colours = ink();
  const traces = links.flatMap((link, index) => [
    {
      ...line(LINK_NAMES[link], rates, (rate) => (rate.bytesPerS[link] ?? 0) / unit.bytes), mode: rates.length < 2 ? "markers" : "lines",
      line: { color: colours.accent, width: 1.5, dash: DASHES[index] }, hovertemplate: `${point} %{x}: ${LINK_NAMES[link]} %{y:.3~g} ${unit.name}/s<extra></extra>`,
    },
    ...(predicted[link] ? [{
      type: "scatter", mode: "lines", name: `${LINK_NAMES[link]}, predicted`, x: [0, end], y: [predicted[link] / unit.bytes, predicted[link] / unit.bytes],
      line: { color: colours.text, width: 1.5, dash: "dash" }, hovertemplate: `predicted ${LINK_NAMES[link]} %{y:.3~g} ${unit.name}/s<extra></extra>`,
    }] : []),
  ]);
  const layout = withLegend(baseLayout(uirevision));
  layout.xaxis = { ...layout.xaxis, title: axisTitle(point), range: [0, end] };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(`${unit.name}/s`), rangemode: "tozero" };
  Plotly.react(element, traces, layout, CONFIG);
  const last = rates.at(-1);
  return last ? `Over the links: ${links.map((link) => `${LINK_NAMES[link]} ${formatBytes(last.bytesPerS[link] ?? 0)} per second`).join(", ")}.` : "Nothing has moved between tiers yet.";
}

function predictedRates(prediction) {
  const seconds = prediction?.copied_bytes_per_pass ? prediction.total_s : (prediction?.step_ms ?? 0) / 1000;
  if (!(seconds > 0)) return {};
  return Object.fromEntries(Object.entries(prediction.copied_bytes ?? {}).map(([link, bytes]) => [link, bytes / seconds]));
}

// What the card's own meters said with each point.
export function drawCard(element, { series, numSteps, unit: point, uirevision }) {
  const samples = thin(series.steps().filter((sample) => sample.gpu), MAX_POINTS, (sample) => sample.gpu.power_w ?? 0);
  const colours = ink();
  const layout = withLegend(baseLayout(uirevision));
  const kinds = [["use_percent", "use", "%", "y", "solid", colours.accent], ["temperature_c", "temperature", "°C", "y", "dot", colours.warn], ["power_w", "power", "W", "y2", "dash", colours.text]];
  const traces = kinds.filter(([key]) => samples.some(({ gpu }) => gpu[key] != null)).map(([key, name, unit, yaxis, dash, color]) => ({
    ...line(name, samples, (sample) => sample.gpu[key] ?? null), yaxis, line: { color, width: 1.5, dash },
    hovertemplate: `${point} %{x}: ${name} %{y:.0f} ${unit}<extra></extra>`,
  }));
  layout.xaxis = { ...layout.xaxis, title: axisTitle(point), range: [0, Math.max(numSteps, samples.at(-1)?.step ?? 0, 1)] };
  layout.yaxis = { ...layout.yaxis, title: axisTitle("% and °C"), range: [0, 105] };
  layout.yaxis2 = rightAxis(layout, { title: axisTitle("W"), rangemode: "tozero" });
  Plotly.react(element, traces, layout, CONFIG);
  return samples.length ? `The card: ${cardWords(samples.at(-1).gpu)}.` : "The card reports nothing about itself.";
}

export function cardWords(gpu) {
  const free = gpu.free_bytes == null ? null : `${formatBytes(gpu.total_bytes - gpu.free_bytes)} of ${formatBytes(gpu.total_bytes)} taken`;
  const parts = [gpu.use_percent == null ? null : `${gpu.use_percent} % busy`, gpu.power_w == null ? null : `${Math.round(gpu.power_w)} W`, gpu.temperature_c == null ? null : `${gpu.temperature_c} °C`, free];
  return parts.filter(Boolean).join(", ");
}

function line(name, samples, value) {
  return { type: "scatter", mode: "lines", name, x: samples.map((sample) => sample.step), y: samples.map(value) };
}

function withLegend(layout) {
  return { ...layout, showlegend: true, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: ink().text } } };
}

function rightAxis(layout, more) {
  return { ...layout.yaxis, title: undefined, overlaying: "y", side: "right", showgrid: false, zeroline: false, tickmode: "auto", nticks: 5, ...more };
}

export function stack(bytesList, x, categories, unit, shape, where, customdata) {
  const present = categories.filter(({ key }) => bytesList.some((bytes) => (bytes[key] ?? 0) > 0));
  return present.map(({ key, label }) => {
    const style = fill(key);
    return {
      type: "scatter", mode: "lines", stackgroup: "device", name: label, x, customdata,
      y: bytesList.map((bytes) => (bytes[key] ?? 0) / unit.bytes),
      fillcolor: style.fillcolor, fillpattern: style.fillpattern, line: { ...style.line, shape },
      text: bytesList.map((bytes) => formatBytes(bytes[key] ?? 0)), hovertemplate: `${where}: ${label} %{text}<extra></extra>`,
    };
  });
}

function predictionTrace(x, bytes, unit, where, shape = "linear", text = undefined) {
  return {
    type: "scatter", mode: "lines", name: "predicted", x, y: bytes.map((value) => value / unit.bytes), text, customdata: bytes.map(formatBytes),
    line: { color: ink().text, width: 2, dash: "dash", shape }, hovertemplate: `${where}: predicted %{customdata}<extra></extra>`,
  };
}

export function budgetTrace(x, budgetBytes, unit) {
  return {
    type: "scatter", mode: "lines", name: "budget", x, y: [budgetBytes / unit.bytes, budgetBytes / unit.bytes],
    line: { color: ink().budget, width: 2.5 }, hovertemplate: `budget ${formatBytes(budgetBytes)}<extra></extra>`,
  };
}

// Bytes at the top of a chart: the budget, or where that is far above what is used, a quarter more than is used.
function topOf({ usedBytes, budgetBytes }) {
  const enough = usedBytes * 1.25;
  if (!budgetBytes) return usedBytes;
  return budgetBytes <= enough || !usedBytes ? Math.max(usedBytes, budgetBytes) : enough;
}

// A budget above the chart is an arrow at its upper edge.
export function memoryLayout({ unit, highest, budgetBytes, uirevision }) {
  const colours = ink();
  const layout = baseLayout(uirevision);
  layout.yaxis = { ...layout.yaxis, title: axisTitle(unit.name), range: [0, (highest / unit.bytes) * 1.12] };
  if (budgetBytes) {
    const isAbove = budgetBytes > highest;
    layout.annotations = [{
      xref: "paper", x: 1, xanchor: "right", showarrow: false,
      ...(isAbove ? { yref: "paper", y: 1, yanchor: "top" } : { y: budgetBytes / unit.bytes, yanchor: "bottom" }),
      text: `${isAbove ? "▲ " : ""}budget ${formatBytes(budgetBytes)}`, font: { color: colours.budgetText, size: 13 },
      // readable over a stack that goes above it
      bgcolor: colours.ground, borderpad: 1,
    }];
  }
  return layout;
}

function memorySummary({ peakBytes, prediction, budgetBytes, over }) {
  const parts = [`Device memory over ${over}: measured peak ${formatBytes(peakBytes)}`];
  if (prediction) parts.push(`predicted ${formatBytes(prediction.device_peak_bytes)}`);
  if (budgetBytes) parts.push(`budget ${formatBytes(budgetBytes)}`);
  return `${parts.join(", ")}.`;
}

export function baseLayout(uirevision) {
  const colours = ink();
  const axis = {
    color: colours.muted, gridcolor: colours.line, zerolinecolor: colours.line, linecolor: colours.line, automargin: true,
    fixedrange: false, tickfont: { size: 12 },
  };
  return {
    uirevision, showlegend: false, hovermode: "x unified", paper_bgcolor: "#00000000", plot_bgcolor: "#00000000",
    font: { family: colours.sans, size: 13, color: colours.text }, margin: { l: 56, r: 8, t: 24, b: 40 },
    hoverlabel: { bgcolor: colours.ground, bordercolor: colours.line, font: { color: colours.text } },
    xaxis: { ...axis }, yaxis: { ...axis }, modebar: { bgcolor: "#00000000", color: colours.muted, activecolor: colours.text },
  };
}

export function axisTitle(text) {
  return { text, font: { size: 12, color: ink().muted }, standoff: 8 };
}

function total(bytesByCategory) {
  return Object.values(bytesByCategory).reduce((sum, value) => sum + value, 0);
}
