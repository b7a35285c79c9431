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

// What a plan is worth, upwards: training by the seconds of a step, generating by its tokens per second.
function worth(point) {
  return facts.by === "speed" ? point.tokens_per_s : point.time_ms / 1000;
}

function worthWords(point) {
  return facts.by === "speed" ? `${formatFigure(point.tokens_per_s)} tokens/s` : stepWords(point.time_ms);
}

function drawFrontier() {
  const colours = ink();
  const unit = axisUnit(Math.max(facts.budget_bytes, ...facts.points.map((point) => point.peak_bytes)));
  const highest = Math.max(...facts.points.map(worth));
  const traces = ["frontier", "baseline", "chosen", "yours"].map((sort) => {
    const points = facts.points.filter((point) => point.sort === sort).sort((a, b) => a.peak_bytes - b.peak_bytes);
    return {
      type: "scatter", ...marks(sort, colours),
      x: points.map((point) => point.peak_bytes / unit.bytes), y: points.map(worth),
      text: points.map((point) => point.letter), textfont: { color: colours.text },
      customdata: points.map((point) => `${point.label}<br>${formatBytes(point.peak_bytes)}, ${worthWords(point)}, ${point.verdict.replaceAll("_", " ")}`),
      hovertemplate: "%{customdata}<extra></extra>",
    };
  }).filter((trace) => trace.x.length);
  traces.push({
    type: "scatter", mode: "lines", name: "budget", x: [facts.budget_bytes / unit.bytes, facts.budget_bytes / unit.bytes],
    y: [0, highest * 1.05], line: { color: colours.budget, width: 2.5 }, hovertemplate: `budget ${formatBytes(facts.budget_bytes)}<extra></extra>`,
  });
  const layout = baseLayout("frontier");
  layout.hovermode = "closest";
  layout.showlegend = true;
  layout.legend = { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: colours.text } };
  layout.xaxis = { ...layout.xaxis, title: axisTitle(`device memory at the peak, ${unit.name}`), rangemode: "tozero" };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(facts.by === "speed" ? "tokens per second" : `seconds for ${facts.time_of}`), rangemode: "tozero" };
  const element = document.getElementById("chart-frontier");
  Plotly.react(element, traces, layout, CONFIG);
  const chosen = facts.points.find((point) => point.sort === "chosen");
  const words = chosen ? `; chosen: ${formatBytes(chosen.peak_bytes)}, ${worthWords(chosen)}` : "";
  element.setAttribute("aria-label", `${facts.points.length} plan${facts.points.length === 1 ? "" : "s"} by peak and ${facts.by === "speed" ? "tokens per second" : `the time of ${facts.time_of}`}${words}; budget ${formatBytes(facts.budget_bytes)}. The table of every plan has the numbers.`);
}

// All steps on one scale of bytes, so that they can be compared at a glance.
function drawSteps() {
  if (!facts.steps.length) return;
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
    element.setAttribute("aria-label", `Device memory within a ${facts.by === "speed" ? "pass" : "step"} of plan ${step.letter}, ${step.label}: peak ${formatBytes(step.peak_bytes)}, ${step.timeline.length} moments over ${stepWords(x.at(-1) ?? 0)}.`);
  }
}

function draw() {
  const embedded = document.getElementById("plans-facts");
  if (!embedded) return;
  facts = JSON.parse(embedded.textContent);
  drawFrontier();
  drawSteps();
}

draw();
onColourChange(draw);

// an edit brings the page anew
document.body.addEventListener("htmx:afterSettle", (event) => {
  if (event.detail.target.id === "plans-page" || event.detail.elt.id === "plans-page") draw();
});
