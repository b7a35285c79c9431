// Colours come from the style sheet's variables, so light, dark and print have one home; textures are Plotly's names for
// the same patterns that templates/parts/patterns.html draws.

const TEXTURES = {
  weights: "", gradients: "/", optimizer_state: "x", activations: ".", logits_and_loss: "-", kv_cache: "|", temporaries: "",
};

// Variables hold a light and a dark value: only a property that uses one says which of them counts.
const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);
const known = new Map();

function variable(name) {
  if (name === "--sans") return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  if (!known.has(name)) {
    probe.style.color = `var(${name}, var(--cat-temporaries))`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

export function fill(category) {
  const colour = variable(`--cat-${category}`);
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
  const changed = () => { known.clear(); callback(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  document.addEventListener("themechange", changed);
}
