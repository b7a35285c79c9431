// What a page knows of a job's measurements. A point is named by its step; where two attempts measured the same step, the
// later attempt holds. Whatever arrives twice is kept once, so a resumed stream or a repeated snapshot changes nothing.

export class Series {
  #byStep = { step: new Map(), eval: new Map(), timeline: new Map() };
  #sorted = {};

  // Returns whether anything changed.
  add(sample) {
    const known = this.#byStep[sample.kind];
    if (!known) return false;
    const before = known.get(sample.step);
    if (before && before.attempt >= sample.attempt) return false;
    delete this.#sorted[sample.kind];
    known.set(sample.step, sample);
    return true;
  }

  addAll(samples) {
    let changed = false;
    for (const sample of samples) changed = this.add(sample) || changed;
    return changed;
  }

  steps() { return this.#inOrder("step"); }
  evals() { return this.#inOrder("eval"); }

  latestStep() { return this.steps().at(-1); }
  latestTimeline() { return this.#inOrder("timeline").at(-1); }

  // Bytes per second over each link: of a step what it moved, of a generate job what moved since the point before.
  linkRates() {
    let before = { run_ms: 0, copied_bytes: {}, attempt: null };
    return this.steps().filter((sample) => sample.copied_bytes).flatMap((sample) => {
      if (sample.run_ms == null) return sample.step_ms > 0 ? [rate(sample, sample.copied_bytes, sample.step_ms)] : [];
      if (sample.attempt !== before.attempt) before = { run_ms: 0, copied_bytes: {}, attempt: sample.attempt };
      const moved = Object.fromEntries(Object.entries(sample.copied_bytes).map(([link, bytes]) => [link, bytes - (before.copied_bytes[link] ?? 0)]));
      const found = sample.run_ms > before.run_ms ? [rate(sample, moved, sample.run_ms - before.run_ms)] : [];
      before = sample;
      return found;
    });
  }

  peakBytes() {
    return this.steps().reduce((peak, sample) => Math.max(peak, sample.device_peak_bytes ?? 0), 0);
  }

  #inOrder(kind) {
    this.#sorted[kind] ??= [...this.#byStep[kind].values()].sort((a, b) => a.step - b.step);
    return this.#sorted[kind];
  }
}

function rate(sample, movedBytes, ms) {
  return { step: sample.step, bytesPerS: Object.fromEntries(Object.entries(movedBytes).map(([link, bytes]) => [link, (bytes * 1000) / ms])) };
}

// At most `limit` samples: of each run of neighbours the one with the highest `value`, so that a peak is never thinned away.
export function thin(samples, limit, value) {
  if (samples.length <= limit) return samples;
  const stride = Math.ceil(samples.length / limit);
  const kept = [];
  for (let start = 0; start < samples.length; start += stride) {
    const run = samples.slice(start, start + stride);
    kept.push(run.reduce((best, sample) => (value(sample) > value(best) ? sample : best)));
  }
  return kept;
}
