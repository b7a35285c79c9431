// Numbers as people read them; the same rules as optimizer/base/units.py.

const UNITS = [["TiB", 1024 ** 4], ["GiB", 1024 ** 3], ["MiB", 1024 ** 2], ["KiB", 1024]];

export function formatBytes(numBytes) {
  for (const [unit, unitBytes] of UNITS) {
    if (Math.abs(numBytes) >= unitBytes) {
      const value = numBytes / unitBytes;
      const decimals = Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
      return `${value.toFixed(decimals)} ${unit}`;
    }
  }
  return `${numBytes} B`;
}

// The unit of a whole axis: GiB from 2 GiB on, so that an axis rarely shows fractions only.
export function axisUnit(maxBytes) {
  return maxBytes >= 2 * 1024 ** 3 ? { name: "GiB", bytes: 1024 ** 3 } : { name: "MiB", bytes: 1024 ** 2 };
}

export function formatDuration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function formatCount(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function formatFigure(value) {
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function signedError(predicted, measured) {
  const percent = ((predicted - measured) / measured) * 100;
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(1)} %`;
}
