// Numbers as people read them: three digits that count, and a unit.

const NONE = "–";

function digits(value) {
  if (value >= 99.5) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

export function number(value) {
  if (value === null || Number.isNaN(value)) return NONE;
  if (value >= 1e6) return `${digits(value / 1e6)} M`;
  if (value >= 1e4) return `${digits(value / 1e3)} k`;
  return digits(value);
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  return `${digits(value / 60)} min`;
}

export function percent(value) {
  if (value === null || Number.isNaN(value)) return NONE;
  return `${value > 0 && value < 0.0995 ? (value * 100).toFixed(1) : Math.round(value * 100)}%`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${units[unit]}`;
}

export function duration(value) {
  const whole = Math.floor(value);
  const parts = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, unit] of parts) {
    if (whole >= size) return `${Math.floor(whole / size)} ${unit}`;
  }
  return `${whole} s`;
}

/** Seconds before now, as −m:ss. */
export function ago(value) {
  const whole = Math.round(value);
  return `−${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
