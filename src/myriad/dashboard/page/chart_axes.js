/** The x axis of charts: steps, tokens, FLOPs or time. */

import { niceStep, ticksOf } from "./chart_paint.js";
import { count, seconds } from "./format.js";

/** Steps between ticks of an axis of time, in seconds. */
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** @typedef {import("./chart.js").Axis} Axis */

/** @param {number} low @param {number} high @param {number} most */
const plainTicks = (low, high, most) => from(low, high, niceStep(Math.max((high - low) / most, 1e-9)));
const wholeTicks = (low, high, most) => from(low, high, Math.max(1, niceStep((high - low) / most)));
const timeTicks = (low, high, most) => {
  const size = (high - low) / most;
  return from(low, high, size <= TIMES[0] || size > TIMES.at(-1) ? niceStep(Math.max(size, 1e-3)) : TIMES.find((step) => step >= size));
};

function from(low, high, step) {
  const first = Math.ceil(low / step - 1e-9) * step;
  return first > high ? [low] : ticksOf(first, high, step);
}

const KINDS = {
  steps: { column: "step", show: count, ticks: wholeTicks },
  tokens: { column: "tokens", show: count, ticks: wholeTicks },
  FLOPs: { column: "total_flops", show: count, ticks: plainTicks },
  time: { column: "time", show: seconds, ticks: timeTicks },
};

/** Names of the axes that a run has. @param {Record<string, any>} it answer of the server */
export const axesOf = (it) => Object.keys(KINDS).filter((name) => it[KINDS[name].column]?.some((value) => value !== null && value > 0));

/** @param {Record<string, any>} it @param {string} name @param {number} began seconds since the epoch @returns {Axis} */
export function axisOf(it, name, began) {
  const { column, show, ticks } = KINDS[name] ?? KINDS.steps;
  let highest = -Infinity;
  // Where a value is missing, or a clock jumped back, the axis stands still.
  const at = it[column].map((value) => (highest = Math.max(highest, value === null ? highest : column === "time" ? value - began : value)));
  return { name, step: it.step, at: at.map((value) => (Number.isFinite(value) ? value : 0)), show, ticks };
}
