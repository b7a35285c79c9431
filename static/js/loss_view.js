// How the loss is drawn: smoothing, scale, what it is drawn over, and the stretch that is looked at. All of it stands in the
// address, so that a view can be sent to a colleague.

const FIELDS = ["smoothing", "scale", "over"];
const UNITS = { steps: "step", tokens: "tokens", time: "minutes since the first step" };

export class LossView {
  #redraw;

  constructor(redraw) {
    this.#redraw = redraw;
    const asked = new URLSearchParams(location.search);
    for (const field of FIELDS) {
      const select = this.#select(field);
      const wanted = asked.get(`loss-${field}`);
      if ([...select.options].some((option) => option.value === wanted)) select.value = wanted;
      select.addEventListener("change", () => { this.#keep({ [`loss-${field}`]: select.value, ...(field === "over" ? { zoom: "" } : {}) }); this.#redraw(); });
    }
  }

  get smoothing() { return Number(this.#select("smoothing").value); }
  get scale() { return this.#select("scale").value; }
  get over() { return this.#select("over").value; }
  get unit() { return UNITS[this.over]; }

  // The stretch in the address, [from, to], or null.
  get zoom() {
    const ends = (new URLSearchParams(location.search).get("zoom") ?? "").split("~").map(Number);
    return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
  }

  // Follows the chart: a stretch that is drawn out by hand goes into the address, a double click takes it away.
  follow(element) {
    element.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (Number.isFinite(from) && Number.isFinite(to)) this.#keep({ zoom: `${Number(from.toPrecision(6))}~${Number(to.toPrecision(6))}` });
      else if (change["xaxis.autorange"]) this.#keep({ zoom: "" });
    });
  }

  positions(samples, { tokensPerStep, startS }) {
    if (this.over === "tokens") return samples.map((sample) => sample.step * tokensPerStep);
    if (this.over === "time") return samples.map((sample) => (sample.time_s - startS) / 60);
    return samples.map((sample) => sample.step);
  }

  // An exponential mean that starts unbiased.
  smoothed(values) {
    let mean = 0;
    return values.map((value, index) => {
      mean = this.smoothing * mean + (1 - this.smoothing) * value;
      return mean / (1 - this.smoothing ** (index + 1));
    });
  }

  #select(field) { return document.getElementById(`loss-${field}`); }

  #keep(changes) {
    const address = new URL(location.href);
    for (const [name, value] of Object.entries(changes)) {
      if (value && !["0", "linear", "steps"].includes(value)) address.searchParams.set(name, value);
      else address.searchParams.delete(name);
    }
    history.replaceState(history.state, "", address);
  }
}
