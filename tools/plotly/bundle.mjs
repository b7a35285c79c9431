// Writes static/vendor/plotly/plotly-lines-bars.min.js from charts.js and prints its sum: `npm ci && node bundle.mjs`.
import { createHash } from "node:crypto";
import { copyFileSync, readFileSync } from "node:fs";
import { build } from "esbuild";

const folder = "../../static/vendor/plotly";
const outfile = `${folder}/plotly-lines-bars.min.js`;

// styles of maps, and promises for browsers of 2013
const unused = {
  name: "unused",
  setup(steps) {
    steps.onResolve({ filter: /maplibre-gl\.css$|^native-promise-only$/ }, ({ path }) => ({ path, namespace: "unused" }));
    steps.onLoad({ filter: /.*/, namespace: "unused" }, () => ({ contents: "module.exports = {};" }));
  },
};

await build({
  entryPoints: ["charts.js"],
  outfile,
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plotly",
  target: "es2020",
  charset: "ascii",
  define: { global: "window", "define.amd": "false", "process.env.NODE_DEBUG": "false" },
  plugins: [unused],
  logLevel: "warning",
});
copyFileSync("node_modules/plotly.js/LICENSE", `${folder}/LICENSE`);
console.log(createHash("sha256").update(readFileSync(outfile)).digest("hex"));
