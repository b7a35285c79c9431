// Small lines beside the figures of a job, from the newest measurements; each is a polyline in a box of 72 by 24.

const WIDTH = 72;
const HEIGHT = 24;
const MAX_POINTS = 60;

export function drawSparks(root, samples) {
  for (const svg of root.querySelectorAll("[data-spark]")) {
    const values = samples.map((sample) => sample[svg.dataset.spark]).filter(Number.isFinite);
    const stride = Math.max(1, Math.ceil(values.length / MAX_POINTS));
    svg.innerHTML = values.length < 2 ? "" : `<polyline points="${pointsOf(values.filter((_, index) => index % stride === 0))}"/>`;
  }
}

// Values that do not change lie in the middle.
export function pointsOf(values) {
  const low = Math.min(...values);
  const range = Math.max(...values) - low;
  return values
    .map((value, index) => [(index / Math.max(1, values.length - 1)) * WIDTH, range ? HEIGHT - 2 - ((value - low) / range) * (HEIGHT - 4) : HEIGHT / 2])
    .map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`)
    .join(" ");
}
