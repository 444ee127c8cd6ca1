/** Charts of one run or of several: which there are, the choices that hold for all of them, and their places. */

import { Chart } from "./chart.js";
import { axesOf } from "./chart_axes.js";
import { bytes, count, percent, plain, seconds } from "./format.js";
import { html, useMemo, useRef, useState } from "./html.js";
import { amend } from "./route.js";
import { lastNotAbove } from "./sorted.js";
import { useSize } from "./theme.js";
import { Choice } from "./widgets.js";

/** Title, column and format of each chart, in order; what the run has no figures for is left out. */
const CURVES = [
  ["Loss", "loss", plain],
  ["Learning rate", "learning_rate", plain],
  ["Gradient norm", "grad_norm", plain],
  ["Tokens per second", "tokens_per_second", count],
  ["MFU", "mfu", percent],
  ["Step time", "step_seconds", seconds],
  ["Exposed communication", "exposed_comm_seconds", seconds],
  ["Wait for data", "data_wait_seconds", seconds],
  ["Wait for checkpoints", "checkpoint_wait_seconds", seconds],
  ["Memory of rank 0", "memory_bytes", bytes],
  ["Loss of the prediction layers", "prediction_loss", plain],
  ["Largest attention logit", "max_attention_logit", plain],
  ["Load of the busiest expert", "expert_load", plain],
  ["Tokens dropped by experts", "dropped_share", percent],
  ["Entropy of routers", "router_entropy", plain],
  ["Gradient noise scale (tokens)", "noise_scale", count],
  ["Loss scale", "loss_scale", count],
];
/** Columns that are axes, or parts of other charts. */
const NO_CHART = new Set([...CURVES.map(([, name]) => name), "step", "time", "tokens", "flops", "total_flops", "noise_gradient", "noise_variance", "skipped", "overflow"]);
const OWN = "user/";
/** Pixels: least width of a chart, and gap between two. */
const [LEAST, GAP] = [340, 10];
const MOST_ACROSS = 6;
const SMOOTHINGS = [["0", "none"], ["0.6", "little"], ["0.9", "much"], ["0.98", "very much"]];

/** Title, column and format of the charts that some answers have figures for. @param {Record<string, any>[]} answers columns of each run @returns {[string, string, any][]} */
export function curvesOf(answers) {
  const numbers = (it, name) => Array.isArray(it[name]) && it[name].length === it.step.length && it[name].some((value) => typeof value === "number");
  const own = [...new Set(answers.flatMap((it) => Object.keys(it).filter((name) => !NO_CHART.has(name) && numbers(it, name))))];
  const further = own.map((name) => [name.startsWith(OWN) ? name.slice(OWN.length) : name.replaceAll("_", " "), name, plain]);
  return [...CURVES, ...further].filter(([, name]) => name === "loss" || answers.some((it) => it[name]?.some((value) => value !== null && value !== 0)));
}

/** The names of the axes that all answers have. @param {Record<string, any>[]} answers */
export const sharedAxes = (answers) => answers.map(axesOf).reduce((all, one) => all.filter((name) => one.includes(name)));

/** @param {Record<string, string>} query */
export const smoothingOf = (query) => (SMOOTHINGS.some(([value]) => value === query.smooth) ? Number(query.smooth) : 0);

/**
 * A curve, smoothed, with what it was before.
 * @param {string} name @param {import("./chart.js").Axis} axis @returns {import("./chart.js").Series}
 */
export function lineOf(name, values, axis, smoothing) {
  const line = { name, step: axis.step, x: axis.at, values };
  return smoothing ? { ...line, values: smooth(axis.step, values, smoothing), raw: values } : line;
}

/** Values at some steps, of which those that the axis covers. @param {{name: string, step: number[], value: (number | null)[]}} found */
export function pointsOf({ name, step, value }, axis) {
  const inside = step.map((_, i) => i).filter((i) => step[i] >= axis.step[0] && step[i] <= axis.step.at(-1));
  return { name, points: true, step: inside.map((i) => step[i]), x: inside.map((i) => axis.at[Math.max(0, lastNotAbove(axis.step, step[i]))]), values: inside.map((i) => value[i]) };
}

/** Exponential moving average, without the pull of its first value; it forgets by steps, however many are shown. */
function smooth(steps, values, weight) {
  const usual = Math.max(1, (steps.at(-1) - steps[0]) / Math.max(1, steps.length - 1));
  let [sum, total, before] = [0, 0, steps[0]];
  return values.map((value, i) => {
    if (value === null || value === undefined) return null;
    const kept = weight ** ((steps[i] - before) / usual);
    [sum, total, before] = [sum * kept + value, total * kept + 1, steps[i]];
    return sum / total;
  });
}

/**
 * All charts in full rows, below the choices that hold for all of them.
 * @param {{charts: {key: string, title: string, show: any, series: import("./chart.js").Series[]}[], axes: string[],
 *   axis: import("./chart.js").Axis, marks: import("./chart.js").Mark[], query: Record<string, string>,
 *   shown: any, whole: string, theme: import("./colours.js").Theme}} props ``shown``: what a zoom shows, in words; ``whole``: the button that ends it
 */
export function ChartGrid({ charts, axes, axis, marks, query, shown, whole, theme }) {
  const box = useRef(null);
  const { width } = useSize(box);
  const [cursor, onCursor] = useState(-1);
  const wide = useMemo(() => widthsOf(width, charts.length), [width, charts.length]);
  const zoomed = Boolean(query.first && query.last);
  const onRange = (range) => amend({ first: range?.first, last: range?.last });
  const range = [axis.at[0], axis.at.at(-1)];
  const log = query.y === "log";
  return html`
    <div class="bar">
      <${Choice} label="By" value=${axis.name} options=${axes} onChange=${(x) => amend(axis.many ? { x, first: undefined, last: undefined } : { x })} />
      <${Choice} label="Scale" value=${log ? "log" : "linear"} options=${["linear", "log"]} onChange=${(y) => amend({ y })} />
      <${Choice} label="Smoothing" value=${String(smoothingOf(query))} options=${SMOOTHINGS} onChange=${(smooth) => amend({ smooth })} />
      ${zoomed && html`<span class="dim">${shown}</span> <button onClick=${() => onRange(null)}>${whole}</button>`}
    </div>
    <div class="charts" ref=${box}>${charts.map(({ key, title, show, series }, i) => html`
      <${Chart} key=${key} ...${{ title, wide: wide[i], show, series, axis, marks, cursor, onCursor, range, onRange, zoomed, log, theme }} />`)}</div>`;
}

/** Widths of charts in full rows of nearly equal numbers. @param {number} width @param {number} number */
function widthsOf(width, number) {
  const rows = Math.ceil(number / Math.max(1, Math.min(MOST_ACROSS, Math.floor((width + GAP) / (LEAST + GAP)))));
  const [few, more] = [Math.floor(number / rows), number % rows];
  return Array.from({ length: number }, (_, i) => {
    const across = i < more * (few + 1) ? few + 1 : few;
    return Math.max(0, Math.floor((width - GAP * (across - 1)) / across));
  });
}
