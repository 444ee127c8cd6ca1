/** Numbers as people read them. SI units; an unknown number is a dash. */

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

/** Three significant digits, without an exponent. @param {number} value */
export function digits(value) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** @param {number} value */
export function seconds(value) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 86400) return `${digits(value / 86400)} d`;
  if (size >= 3600) return `${digits(value / 3600)} h`;
  if (size >= 120) return `${digits(value / 60)} min`;
  if (size >= 1) return `${digits(value)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3)} ms`;
  return size === 0 ? "0 s" : size >= 1e-6 ? `${digits(value * 1e6)} µs` : `${digits(value * 1e9)} ns`;
}

/** Exact below a million. @param {number} value */
export function count(value) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, name] of /** @type {[number, string][]} */ ([[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]])) {
    if (size >= unit) return `${digits(value / unit)} ${name}`;
  }
  return Number.isInteger(value) || size >= 1e4 ? Math.round(value).toLocaleString("en") : digits(value);
}

/** @param {number} value */
export function bytes(value) {
  if (unknown(value)) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = value < 1 ? 0 : Math.min(5, Math.floor(Math.log2(value) / 10));
  return `${power ? digits(value / 1024 ** power) : value} ${names[power]}`;
}

/** @param {number} ratio */
export function percent(ratio) {
  if (unknown(ratio)) return "–";
  const text = (Math.abs(ratio) * 100).toFixed(Math.abs(ratio) < 0.1 ? 2 : 1);
  return `${ratio < 0 && Number(text) > 0 ? "−" : ""}${text} %`;
}

/** @param {number} z */
export const score = (z) => (unknown(z) ? "–" : `${z < 0 ? "−" : "+"}${Math.abs(z).toFixed(1)}`);

/** Seconds since the epoch as local time. @param {number} epoch */
export function clock(epoch) {
  if (unknown(epoch)) return "–";
  const time = new Date(epoch * 1000);
  const today = new Date().toDateString() === time.toDateString();
  const of_day = time.toLocaleTimeString("en-GB");
  return today ? of_day : `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${of_day}`;
}

/** "1 rank", "3 ranks". @param {number} number @param {string} noun */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
