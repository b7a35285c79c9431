// Charts of the pages of machines, models and datasets. Each has its table on the page; without JavaScript that is what is left.

import { CONFIG, axisTitle, baseLayout } from "./charts.js";
import { axisUnit, formatBytes, formatCount, formatFigure } from "./format.js";
import { ink, onColourChange } from "./palette.js";
import { isLoaded, loaded } from "./plotly.js";

function factsOf(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

// One point a run, the diagonal is where the prediction came true.
function drawPredicted(id, points, { unit, unitName, write }) {
  const element = document.getElementById(id);
  if (!element) return;
  const colours = ink();
  const values = points.flatMap(([predicted, measured]) => [predicted / unit, measured / unit]);
  const ends = [Math.min(...values) * 0.9, Math.max(...values) * 1.1];
  const traces = [
    { type: "scatter", mode: "lines", name: "as predicted", x: ends, y: ends, line: { color: colours.text, width: 1.5, dash: "dash" }, hoverinfo: "skip" },
    {
      type: "scatter", mode: "markers", name: "runs", x: points.map(([predicted]) => predicted / unit), y: points.map(([, measured]) => measured / unit),
      text: points.map(([predicted, measured, name]) => `${name}: predicted ${write(predicted)}, measured ${write(measured)}`),
      hovertemplate: "%{text}<extra></extra>", marker: { color: colours.accent, size: 8, line: { color: colours.ground, width: 1 } },
    },
  ];
  const layout = baseLayout(id);
  const type = ends[1] > 20 * ends[0] ? "log" : "linear";
  layout.hovermode = "closest";
  layout.margin = { ...layout.margin, t: 8 };
  layout.xaxis = { ...layout.xaxis, type, title: axisTitle(`predicted, ${unitName}`) };
  layout.yaxis = { ...layout.yaxis, type, title: axisTitle(`measured, ${unitName}`) };
  Plotly.react(element, points.length ? traces : [], layout, CONFIG);
}

function drawAccuracy(facts) {
  const peak = axisUnit(Math.max(1, ...facts.peak.flat().filter(Number.isFinite)));
  drawPredicted("chart-peak", facts.peak, { unit: peak.bytes, unitName: peak.name, write: formatBytes });
  drawPredicted("chart-step", facts.step, { unit: 1, unitName: "ms", write: (value) => `${formatFigure(value)} ms` });
}

// Lengths double from bar to bar.
function drawLengths(facts) {
  const element = document.getElementById("chart-lengths");
  const colours = ink();
  const layout = baseLayout("lengths");
  layout.hovermode = "closest";
  layout.margin = { ...layout.margin, t: 8 };
  layout.bargap = 0.08;
  layout.xaxis = { ...layout.xaxis, type: "category", title: axisTitle(facts.unit) };
  layout.yaxis = { ...layout.yaxis, title: axisTitle(facts.counted), tickformat: ",~s" };
  Plotly.react(element, [{
    type: "bar", x: facts.bins.map((bin) => bin.label), y: facts.bins.map((bin) => bin.count),
    text: facts.bins.map((bin) => `${bin.label} ${facts.unit}: ${formatCount(bin.count)} ${facts.counted}`), textposition: "none",
    hovertemplate: "%{text}<extra></extra>", marker: { color: colours.accent },
  }], layout, CONFIG);
}

function draw() {
  if (!isLoaded()) return;
  const accuracy = factsOf("accuracy-facts");
  if (accuracy && document.getElementById("chart-peak")) drawAccuracy(accuracy);
  const lengths = factsOf("length-facts");
  if (lengths) drawLengths(lengths);
}

onColourChange(draw);
loaded.then(draw);
