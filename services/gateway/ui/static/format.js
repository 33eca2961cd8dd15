// Numbers as people read them. Each function takes null for "not known" and gives a dash.

const DASH = "–";
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : DASH);

export const short = (value) => (!isNumber(value) ? DASH : Math.abs(value) < 10000 ? whole.format(value) : compact.format(value));

export function seconds(value) {
  if (!isNumber(value)) return DASH;
  if (value < 0.0005) return "0 ms";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 99.5) return `${value.toFixed(1)} s`;
  return span(value);
}

/** A long time: "3 min 20 s", "4 h 5 min", "2 d 3 h". */
export function span(value) {
  if (!isNumber(value)) return DASH;
  const total = Math.max(0, Math.round(value));
  if (total < 60) return `${total} s`;
  const [minutes, hours, days] = [Math.floor(total / 60), Math.floor(total / 3600), Math.floor(total / 86400)];
  if (minutes < 60) return total % 60 ? `${minutes} min ${total % 60} s` : `${minutes} min`;
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

/** The same in one unit: "12 s", "3 min", "4 h". */
export function age(value) {
  if (!isNumber(value)) return DASH;
  if (value < 59.5) return `${Math.max(0, Math.round(value))} s`;
  if (value < 3570) return `${Math.round(value / 60)} min`;
  if (value < 84600) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function bytes(value) {
  if (!isNumber(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export const percent = (share) => (isNumber(share) ? `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %` : DASH);

export const rate = (value) => (!isNumber(value) ? DASH : value < 10 ? value.toFixed(1) : short(value));

export const plural = (number, word, words = `${word}s`) => `${count(number)} ${number === 1 ? word : words}`;

/** A word of the API as a person says it: "prefill_busy" -> "prefill busy". */
export const words = (name) => String(name ?? "").replaceAll("_", " ");

/** The value below which a share of the sorted values lies; null of none. */
export function quantile(sorted, share) {
  if (!sorted.length) return null;
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
