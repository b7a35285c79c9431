// The parts of plotly.js that the pages draw with: lines, points, bars, legends, shapes, hover, zoom. Nothing is loaded for
// 3-D, maps, sliders or images. The names are plotly.js 4's own modules.
"use strict";

require("plotly.js/build/plotcss");
const { register } = require("plotly.js/src/registry");
const methods = require("plotly.js/src/plot_api");

for (const [name, fn] of Object.entries(methods)) {
  if (!name.startsWith("_")) exports[name] = fn;
  register({ moduleType: "apiMethod", name, fn });
}

register([
  require("plotly.js/src/traces/scatter"),
  require("plotly.js/lib/bar"),
  require("plotly.js/src/components/annotations"),
  require("plotly.js/src/components/selections"),
  require("plotly.js/src/components/shapes"),
  require("plotly.js/src/components/colorscale"),
  require("plotly.js/src/components/colorbar"),
  require("plotly.js/src/components/legend"),
  require("plotly.js/src/components/fx"),
  require("plotly.js/src/components/modebar"),
  require("plotly.js/src/locale-en"),
  require("plotly.js/src/locale-en-us"),
]);

exports.version = require("plotly.js/src/version").version;
exports.Plots = { resize: require("plotly.js/src/plots/plots").resize };
