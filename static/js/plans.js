// The page Plans: every plan as a point, and the predicted step of each plan that is compared.

import { CONFIG, axisTitle, baseLayout, budgetTrace, memoryLayout, stack } from "./charts.js";
import { axisUnit, formatBytes, formatFigure } from "./format.js";
import { ink, onColourChange } from "./palette.js";
import { dropPicture, isLoaded, loaded } from "./plotly.js";

let facts;

function stepWords(ms) {
  return ms < 1000 ? `${formatFigure(ms)} ms` : `${formatFigure(ms / 1000)} s`;
}

// Ours filled, one's own a diamond, baselines hollow, the frontier a line with small points.
function marks(sort, colours) {
  return {
    frontier: { mode: "lines+markers+text", name: "frontier", textposition: "top center", line: { color: colours.accent, width: 1, shape: "hv" }, marker: { size: 6, color: colours.accent } },
    baseline: { mode: "markers+text", name: "standard setups", textposition: "top center", marker: { size: 10, symbol: "circle-open", color: colours.text, line: { width: 1.5, color: colours.text } } },
    chosen: { mode: "markers+text", name: "recommended", textposition: "top center", marker: { size: 14, color: colours.accent, line: { width: 1, color: colours.text } } },
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

// The stretch between the plans worth looking at: the frontier, the chosen plan and one's own, with a tenth of air, and more at the
// top, where the limit's name and the letters of plans stand; baselines far off are reached by zooming out.
function zoomOf() {
  const near = facts.points.filter((point) => point.sort !== "baseline" || point.letter);
  const shown = near.length > 1 ? near : facts.points;
  const span = (values, above) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const stretch = high - low || high || 1;
    return [Math.max(0, low - 0.1 * stretch), high + above * stretch];
  };
  return { bytes: span(shown.map((point) => point.peak_bytes), 0.1), worth: span(shown.map(worth), 0.4) };
}

// The limit that the verdict goes by, and the band above it in which a plan may fit (tight).
function drawLimits(layout, { unit, view, colours }) {
  const isBeyond = facts.fits_bytes > view.bytes[1];
  const rule = { yref: "paper", y0: 0, y1: 1, layer: "below" };
  layout.shapes = isBeyond ? [] : [
    { ...rule, type: "line", x0: facts.fits_bytes / unit.bytes, x1: facts.fits_bytes / unit.bytes, line: { color: colours.budget, width: 2.5 } },
    { ...rule, type: "rect", x0: facts.fits_bytes / unit.bytes, x1: facts.tight_bytes / unit.bytes, fillcolor: colours.warn, opacity: 0.2, line: { width: 0 } },
  ];
  layout.annotations = [{
    xref: isBeyond ? "paper" : "x", x: isBeyond ? 1 : facts.fits_bytes / unit.bytes, xanchor: isBeyond ? "right" : "left", yref: "paper", y: 1, yanchor: "top",
    text: `usable ${formatBytes(facts.fits_bytes)}${isBeyond ? " ▸" : ""}`, showarrow: false, font: { color: colours.budgetText, size: 13 }, bgcolor: colours.ground, borderpad: 1,
  }];
}

// A plan that is clicked stands beside the recommended one; the address says so.
function select(key) {
  if (!key || key === "chosen" || key === "yours") return;
  const address = new URL(location.href);
  address.searchParams.delete("with");
  address.searchParams.append("with", "chosen");
  address.searchParams.append("with", key);
  location.assign(address);
}

function drawFrontier() {
  const colours = ink();
  const unit = axisUnit(Math.max(...facts.points.map((point) => point.peak_bytes)));
  const view = zoomOf();
  const traces = ["frontier", "baseline", "chosen", "yours"].map((sort) => {
    const points = facts.points.filter((point) => point.sort === sort).sort((a, b) => a.peak_bytes - b.peak_bytes);
    return {
      type: "scatter", ...marks(sort, colours),
      x: points.map((point) => point.peak_bytes / unit.bytes), y: points.map(worth),
      keys: points.map((point) => point.key), text: points.map((point) => point.letter), textfont: { color: colours.text },
      customdata: points.map((point) => `${point.label}<br>${formatBytes(point.peak_bytes)}, ${worthWords(point)}, ${point.verdict.replaceAll("_", " ")}`),
      hovertemplate: "%{customdata}<extra></extra>",
    };
  }).filter((trace) => trace.x.length);
  const layout = baseLayout("frontier");
  layout.hovermode = "closest";
  layout.showlegend = true;
  layout.legend = { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom", font: { color: colours.text } };
  layout.xaxis = { ...layout.xaxis, title: axisTitle(`device memory at the peak, ${unit.name}`), range: view.bytes.map((bytes) => bytes / unit.bytes) };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(facts.by === "speed" ? "tokens per second" : `seconds for ${facts.time_of}`), range: view.worth };
  drawLimits(layout, { unit, view, colours });
  const element = document.getElementById("chart-frontier");
  const isNew = !element.data;
  Plotly.react(element, traces, layout, CONFIG);
  dropPicture(element);
  if (isNew) element.on("plotly_click", ({ points: [clicked] }) => select(clicked.data.keys?.[clicked.pointIndex]));
  const chosen = facts.points.find((point) => point.sort === "chosen");
  const words = chosen ? `; chosen: ${formatBytes(chosen.peak_bytes)}, ${worthWords(chosen)}` : "";
  element.setAttribute("aria-label", `${facts.points.length} plan${facts.points.length === 1 ? "" : "s"} by peak and ${facts.by === "speed" ? "tokens per second" : `the time of ${facts.time_of}`}${words}; usable ${formatBytes(facts.fits_bytes)}. The table of every plan has the numbers.`);
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
  if (!embedded || !isLoaded()) return;
  facts = JSON.parse(embedded.textContent);
  drawFrontier();
  drawSteps();
}

loaded.then(draw);
onColourChange(draw);

// an edit brings the page anew
document.body.addEventListener("htmx:afterSettle", (event) => {
  if (event.detail.target.id === "plans-page" || event.detail.elt.id === "plans-page") draw();
});
