/** Norms of layers (`telemetry.layer_norms_every`): a cell for each layer and each step in which the run stored them. */

import { askJson } from "./api.js";
import { count, plain } from "./format.js";
import { html, useMemo, useState } from "./html.js";
import { useAnswer } from "./query.js";
import { Problem } from "./widgets.js";

const KINDS = { update: "update / parameter", gradient: "gradient", parameter: "parameter" };
/** Opacity of the smallest value. */
const FAINT = 0.06;
/** Pixels: width of the map, largest width of a cell, least and largest height of a row, height of the map. */
const [WIDTH, WIDEST, LEAST, TALLEST, TALL] = [900, 28, 3, 14, 420];

/**
 * @typedef {(number | null)[][]} Rows a row for each layer, a value for each step
 * @typedef {{step: number[], layers: string[], gradient: Rows, parameter: Rows, update: Rows}} Norms
 * @param {{newest: number}} props newest step with norms
 */
export function LayerNorms({ newest }) {
  const answer = useAnswer("norms", () => askJson("/api/norms"), newest);
  const [kind, setKind] = useState("update");
  /** @type {Norms | undefined} */
  const norms = answer.value;
  const values = useMemo(() => norms && valuesOf(norms, kind), [norms, kind]);
  return html`
    <div class="card norms">
      <h2>Norms of layers</h2>
      <${Problem} error=${answer.error} />
      <label>Show <select value=${kind} onChange=${(event) => setKind(event.target.value)}>
        ${Object.entries(KINDS).map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}</select></label>
      ${values && html`<p class="dim">${sentence(norms, values)}</p><${Map} norms=${norms} values=${values} />`}
    </div>`;
}

/** The change of the parameters is shown as a share of their norm, as its size alone says little. @param {Norms} norms @returns {Rows} */
function valuesOf(norms, kind) {
  if (kind !== "update") return norms[kind];
  return norms.update.map((row, i) => row.map((value, step) => {
    const whole = norms.parameter[i][step];
    return value === null || !whole ? null : value / whole;
  }));
}

/** Name the largest value of the newest step. @param {Norms} norms @param {Rows} values */
function sentence(norms, values) {
  const now = values.map((row) => row.at(-1) ?? -Infinity);
  const most = now.indexOf(Math.max(...now));
  const where = `Layers from above, steps ${count(norms.step[0])} to ${count(norms.step.at(-1))} from the left, a stronger colour is a larger value.`;
  return now[most] === -Infinity ? where : `${where} Largest now: ${norms.layers[most]}, ${plain(now[most])}.`;
}

/** The opacity of a cell is linear in the logarithm. @param {{norms: Norms, values: Rows}} props */
function Map({ norms, values }) {
  const known = values.flat().filter((value) => value !== null && value > 0);
  const [low, high] = [Math.log(Math.min(...known)), Math.log(Math.max(...known))];
  const wide = Math.min(WIDEST, WIDTH / norms.step.length);
  const tall = Math.max(LEAST, Math.min(TALLEST, TALL / norms.layers.length));
  const shade = (value) => (value > 0 ? FAINT + (1 - FAINT) * (high > low ? (Math.log(value) - low) / (high - low) : 1) : FAINT);
  return html`
    <svg class="loads" width=${wide * norms.step.length} height=${tall * norms.layers.length} role="img"
      aria-label="Heat map: ${count(norms.layers.length)} layers from above, ${count(norms.step.length)} steps from the left">
      ${values.map((row, i) => row.map((value, step) => html`
        <rect key="${i} ${step}" x=${wide * step} y=${tall * i} width=${wide - 1} height=${tall - 1} opacity=${shade(value)}>
          <title>${norms.layers[i]}, step ${count(norms.step[step])}: ${plain(value)}</title></rect>`))}
    </svg>`;
}
