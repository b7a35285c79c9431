// Colours come from the style sheet's variables, so light, dark and print have one home; textures are Plotly's names for
// the same patterns that templates/parts/patterns.html draws.

const TEXTURES = {
  weights: "", gradients: "/", optimizer_state: "x", activations: ".", logits_and_loss: "-", kv_cache: "|", temporaries: "",
};

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function fill(category) {
  const colour = variable(`--cat-${category}`) || variable("--cat-temporaries");
  const shape = TEXTURES[category] ?? "";
  return {
    fillcolor: colour,
    fillpattern: { shape, bgcolor: colour, fgcolor: variable("--fill-edge"), fgopacity: 0.45, size: 7, solidity: 0.18 },
    line: { color: variable("--fill-edge"), width: 0.75 },
  };
}

export function ink() {
  return {
    text: variable("--text"), muted: variable("--muted"), line: variable("--line"), accent: variable("--accent"),
    budget: variable("--budget"), budgetText: variable("--budget-text"), warn: variable("--warn"), sans: variable("--sans"),
    ground: variable("--raised"),
  };
}

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

// One of several runs in a chart: distinguished by colour, by dash and by the letter at its end.
export function runStyle(index) {
  return { color: variable(`--run-${(index % 5) + 1}`), dash: DASHES[index % DASHES.length], width: index < 5 ? 2 : 3.5 };
}

export function onColourChange(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", callback);
}
