/** Format numbers with SI units; an unknown number is a dash. */

const unknown = (value) => value === null || value === undefined || Number.isNaN(value);

/** Above this, `toFixed` switches to exponent notation. */
const LARGEST_WRITTEN = 1e15;

/** @param {number} value such as 1.23 × 10³⁰ */
function powerOfTen(value) {
  const [front, power] = value.toExponential(2).split("e+");
  return `${front} × 10${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("")}`;
}

/** Three significant digits, without an exponent; `more` of them where neighbours would look alike. @param {number} value */
export function digits(value, more = 0) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  if (size >= LARGEST_WRITTEN) return powerOfTen(value);
  return value.toFixed((size >= 100 ? 0 : size >= 10 ? 1 : 2) + more);
}

/** A plain number: three digits after the point, more of a small one. @param {number | null | undefined} value */
export function plain(value, more = 0) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return count(value, more);
  return value.toFixed(Math.min(20, (size === 0 || size >= 0.1 ? 3 : 2 - Math.floor(Math.log10(size))) + more));
}

/** @param {number} value */
export function seconds(value, more = 0) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 86400) return `${digits(value / 86400, more)} d`;
  if (size >= 3600) return `${digits(value / 3600, more)} h`;
  if (size >= 120) return `${digits(value / 60, more)} min`;
  if (size >= 1) return `${digits(value, more)} s`;
  if (size >= 1e-3) return `${digits(value * 1e3, more)} ms`;
  return size === 0 ? "0 s" : size >= 1e-6 ? `${digits(value * 1e6, more)} µs` : `${digits(value * 1e9, more)} ns`;
}

/** Exact below a million. @param {number} value */
export function count(value, more = 0) {
  if (unknown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e18) return powerOfTen(value);
  for (const [unit, name] of /** @type {[number, string][]} */ ([[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]])) {
    if (size >= unit) return `${digits(value / unit, more)} ${name}`;
  }
  if (Number.isInteger(value) || size >= 1e3) {
    return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: more });
  }
  return digits(value, more);
}

/** @param {number} value */
export function bytes(value) {
  if (unknown(value)) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = value < 1 ? 0 : Math.min(5, Math.floor(Math.log2(value) / 10));
  return `${power ? digits(value / 1024 ** power) : value} ${names[power]}`;
}

/** @param {number} ratio */
export function percent(ratio, more = 0) {
  if (unknown(ratio)) return "–";
  if (Math.abs(ratio) * 100 >= LARGEST_WRITTEN) return `${powerOfTen(ratio * 100)} %`;
  const text = (Math.abs(ratio) * 100).toFixed((Math.abs(ratio) < 0.1 ? 2 : 1) + more);
  return `${ratio < 0 && Number(text) > 0 ? "−" : ""}${text} %`;
}

/** @param {number} z */
export const score = (z) => (unknown(z) ? "–" : `${z < 0 ? "−" : "+"}${Math.abs(z).toFixed(1)}`);

/** A difference as a share. @param {number} ratio */
export const deviation = (ratio) => (unknown(ratio) ? "–" : `${ratio < 0 ? "−" : "+"}${(Math.abs(ratio) * 100).toFixed(Math.abs(ratio) < 0.0995 ? 1 : 0)} %`);

/** Seconds since the epoch as local time. @param {number} epoch */
export function clock(epoch) {
  const time = new Date((epoch ?? NaN) * 1000);
  if (unknown(time.getTime())) return "–";
  const today = new Date().toDateString() === time.toDateString();
  const of_day = time.toLocaleTimeString("en-GB");
  return today ? of_day : `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${of_day}`;
}

/** Like `clock`, with day, year and time zone, to compare with logs of other machines. @param {number} epoch */
export function wholeClock(epoch) {
  const time = new Date((epoch ?? NaN) * 1000);
  return unknown(time.getTime()) ? "" : time.toLocaleString("en-GB", { dateStyle: "long", timeStyle: "long" });
}

/** "1 rank", "3 ranks". @param {number} number @param {string} noun */
export const plural = (number, noun, nouns = `${noun}s`) => `${count(number)} ${number === 1 ? noun : nouns}`;
