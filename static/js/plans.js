// The page Plans: every plan as a point, and the predicted step of each plan that is compared.

import { CONFIG, axisTitle, baseLayout, budgetTrace, memoryLayout, stack } from "./charts.js";
import { axisUnit, formatBytes, formatFigure } from "./format.js";
import { ink, onColourChange } from "./palette.js";

let facts;

function stepWords(ms) {
  return ms < 1000 ? `${formatFigure(ms)} ms` : `${formatFigure(ms / 1000)} s`;
}

// Ours filled, one's own a diamond, baselines hollow, the frontier a line with small points.
function marks(sort, colours) {
  return {
    frontier: { mode: "lines+markers", name: "frontier", line: { color: colours.accent, width: 1, shape: "hv" }, marker: { size: 6, color: colours.accent } },
    baseline: { mode: "markers", name: "baselines", marker: { size: 10, symbol: "circle-open", color: colours.text, line: { width: 1.5, color: colours.text } } },
    chosen: { mode: "markers+text", name: "chosen", textposition: "top center", marker: { size: 14, color: colours.accent, line: { width: 1, color: colours.text } } },
    yours: { mode: "markers+text", name: "yours", textposition: "top center", marker: { size: 13, symbol: "diamond", color: colours.warn, line: { width: 1, color: colours.text } } },
  }[sort];
}

function drawFrontier() {
  const colours = ink();
  const unit = axisUnit(Math.max(facts.budget_bytes, ...facts.points.map((point) => point.peak_bytes)));
  const longest = Math.max(...facts.points.map((point) => point.time_ms));
  const traces = ["frontier", "baseline", "chosen", "yours"].map((sort) => {
    const points = facts.points.filter((point) => point.sort === sort).sort((a, b) => a.peak_bytes - b.peak_bytes);
    return {
      type: "scatter", ...marks(sort, colours),
      x: points.map((point) => point.peak_bytes / unit.bytes), y: points.map((point) => point.time_ms / 1000),
      text: points.map((point) => point.letter), textfont: { color: colours.text },
      customdata: points.map((point) => `${point.label}<br>${formatBytes(point.peak_bytes)}, ${stepWords(point.time_ms)}, ${point.verdict.replaceAll("_", " ")}`),
      hovertemplate: "%{customdata}<extra></extra>",
    };
  }).filter((trace) => trace.x.length);
  traces.push({
    type: "scatter", mode: "lines", name: "budget", x: [facts.budget_bytes / unit.bytes, facts.budget_bytes / unit.bytes],
    y: [0, (longest * 1.05) / 1000], line: { color: colours.budget, width: 2.5 }, hovertemplate: `budget ${formatBytes(facts.budget_bytes)}<extra></extra>`,
  });
  const layout = baseLayout("frontier");
  layout.hovermode = "closest";
  layout.showlegend = true;
  layout.legend = { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: colours.text } };
  layout.xaxis = { ...layout.xaxis, title: axisTitle(`device memory at the peak, ${unit.name}`), rangemode: "tozero" };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(`seconds for ${facts.time_of}`), rangemode: "tozero" };
  const element = document.getElementById("chart-frontier");
  Plotly.react(element, traces, layout, CONFIG);
  const chosen = facts.points.find((point) => point.sort === "chosen");
  element.setAttribute("aria-label", `${facts.points.length} plans by peak and the time of ${facts.time_of}; chosen: ${formatBytes(chosen.peak_bytes)}, ${stepWords(chosen.time_ms)}; budget ${formatBytes(facts.budget_bytes)}. The table of every plan has the numbers.`);
}

// All steps on one scale of bytes, so that they can be compared at a glance.
function drawSteps() {
  const totals = facts.steps.flatMap((step) => step.timeline.map((moment) => Object.values(moment.bytes).reduce((sum, bytes) => sum + bytes, 0)));
  const highest = Math.max(facts.budget_bytes <= 4 * Math.max(...totals, 1) ? facts.budget_bytes : 0, ...totals, 1);
  const unit = axisUnit(highest);
  for (const step of facts.steps) {
    const x = step.timeline.map((moment) => moment.offset_ms);
    const traces = stack(step.timeline.map((moment) => moment.bytes), x, facts.categories, unit, "hv", "%{customdata}", step.timeline.map((moment) => `${moment.phase}, ${stepWords(moment.offset_ms)}`));
    const showsBudget = facts.budget_bytes <= highest;
    if (showsBudget) traces.push(budgetTrace([0, x.at(-1) ?? 1], facts.budget_bytes, unit));
    const layout = memoryLayout({ unit, highest, budgetBytes: showsBudget ? facts.budget_bytes : null, uirevision: `step-${step.letter}` });
    layout.xaxis = { ...layout.xaxis, title: axisTitle("ms"), range: [0, x.at(-1) ?? 1] };
    const element = document.getElementById(`chart-step-${step.letter}`);
    Plotly.react(element, traces, layout, CONFIG);
    element.setAttribute("aria-label", `Device memory within a step of plan ${step.letter}, ${step.label}: peak ${formatBytes(step.peak_bytes)}, ${step.timeline.length} moments over ${stepWords(x.at(-1) ?? 0)}.`);
  }
}

function draw() {
  facts = JSON.parse(document.getElementById("plans-facts").textContent);
  drawFrontier();
  drawSteps();
}

draw();
onColourChange(draw);

// an edit brings the page anew
document.body.addEventListener("htmx:afterSettle", (event) => {
  if (event.detail.target.id === "plans-page" || event.detail.elt.id === "plans-page") draw();
});
