/**
 * A chart of one or several curves over the run, with its events as marks. All charts of a page share the cursor and
 * the range: drag to look closer, double-click for all; arrow keys move the cursor, + and - change the range.
 *
 * @typedef {{first: number, last: number}} Range steps
 * @typedef {{name: string, step: number[], x: number[], values: (number | null)[], raw?: (number | null)[], points?: boolean, colour?: number, dashed?: boolean}} Series
 *   ``x``: places on the axis, ascending; ``raw``: the values before smoothing, drawn pale; ``points``: with a dot for each;
 *   ``colour``: place of its colour among those of curves, if not its own place
 * @typedef {{at: number, step: number, text: string, label?: string, kind: "bad" | "checkpoint" | "other"}} Mark
 *   ``at``: its place on the axis; ``label``: shown beside the mark
 * @typedef {{name: string, step: number[], at: number[], show: (value: number, more?: number) => string, ticks: (low: number, high: number, most: number) => number[], many?: boolean}} Axis
 *   ``at``: the place of each step; ``many``: the curves are those of several runs, and a "step" is a place on the axis
 */

import { drawChart, inkOf, seriesColour } from "./chart_paint.js";
import { save } from "./chart_files.js";
import { count } from "./format.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { lastNotAbove } from "./sorted.js";
import { useSize } from "./theme.js";

export const [LEFT, RIGHT] = [58, 8];
/** Pixels within which a mark is at the cursor, and most of them in the tip. */
const [NEAR, MOST_TOLD] = [6, 5];

/**
 * @param {object} props
 * @param {string} props.title @param {number} props.wide pixels @param {Axis} props.axis @param {Series[]} props.series
 * @param {(value: number | null | undefined, more?: number) => string} props.show ``more``: digits beyond the usual
 * @param {Mark[]} props.marks
 * @param {number} props.cursor a step; -1: none @param {(step: number) => void} props.onCursor
 * @param {[number, number]} props.range on the axis @param {(range: Range | null) => void} props.onRange
 * @param {boolean} props.zoomed @param {boolean} props.log @param {import("./colours.js").Theme} props.theme
 */
export function Chart(props) {
  const { title, wide, axis, series, show, marks, cursor, onCursor, range, onRange, zoomed, log, theme } = props;
  const box = useRef(null);
  const canvas = useRef(null);
  const [held, setHeld] = useState(-1);
  const [pointed, setPointed] = useState(false);
  const { width, height } = useSize(box);
  const room = width - LEFT - RIGHT;
  const xOf = (at) => LEFT + ((at - range[0]) / (range[1] - range[0] || 1)) * room;
  useLayoutEffect(() => {
    if (!width || !axis.at.length) return;
    const context = sized(canvas.current, width, height);
    drawChart(context, { width, height, axis, series, show, marks, range, log, ink: inkOf(theme) });
  }, [width, height, axis, series, marks, range[0], range[1], log, theme]);

  const stepAt = (event) => {
    const share = (event.clientX - box.current.getBoundingClientRect().left - LEFT) / room;
    return axis.step[nearest(axis.at, range[0] + Math.max(0, Math.min(1, share)) * (range[1] - range[0]))];
  };
  const release = (event) => {
    const [first, last] = [Math.min(held, stepAt(event)), Math.max(held, stepAt(event))];
    setHeld(-1);
    if (held >= 0 && last > first && Math.abs(placeOf(axis, last) - placeOf(axis, first)) * room > 4 * (range[1] - range[0])) onRange({ first, last });
  };
  const onKey = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    const index = cursor < 0 ? axis.step.length - 1 : lastNotAbove(axis.step, cursor);
    if (event.key === "Escape") {
      onRange(null);
      onCursor(-1);
    } else if (event.key === "+" || event.key === "-") onRange(closer(axis.step, index, event.key === "+" ? 0.25 : 1));
    else if (by) onCursor(axis.step[Math.max(0, Math.min(axis.step.length - 1, index + by))]);
    else return;
    event.preventDefault();
  };
  const place = cursor >= 0 ? xOf(placeOf(axis, cursor)) : -1;
  const isShown = place >= LEFT - 1 && place <= width - RIGHT + 1;
  const values = isShown ? valuesAt(series, cursor, show) : [];
  const at = axis.many && axis.name !== "steps" ? (axis.name === "time" ? `after ${axis.show(cursor)}` : `${axis.show(cursor)} ${axis.name}`) : `step ${count(cursor)}`;
  const said = axis.many ? (isShown ? at : "") : isShown ? `${at}: ${values[0] || "–"}` : newest(axis, series, show, zoomed);
  const spoken = isShown && (axis.many || series.length > 1) ? `${at}: ${namedValues(series, values).join(", ")}` : said;
  const nearby = isShown ? marks.filter((mark) => Math.abs(xOf(mark.at) - place) < NEAR).map((mark) => mark.text) : [];

  return html`
    <figure class="card chart" style=${{ width: `${wide}px` }}>
      <figcaption>${title}${series.length > 1 && !axis.many && html`<${Names} series=${series} theme=${theme} />`}<span></span><b>${said}</b>
        <${Save} ...${{ title, axis, series, show, marks, range, log, theme }} /></figcaption>
      <div class="plot" ref=${box} tabindex="0" role="application" aria-roledescription="chart" aria-label="${title}, ${spoken}${nearby.length ? `, ${nearby[0]}` : ""}" onKeyDown=${onKey}
        onPointerMove=${(event) => {
          setPointed(true);
          onCursor(stepAt(event));
        }} onPointerLeave=${() => {
          setPointed(false);
          onCursor(-1);
        }} onDblClick=${() => onRange(null)} onFocus=${() => setPointed(true)} onBlur=${() => setPointed(false)}
        onPointerDown=${(event) => {
          box.current.setPointerCapture(event.pointerId);
          setHeld(stepAt(event));
        }} onPointerUp=${release} onPointerCancel=${() => setHeld(-1)}>
        <canvas ref=${canvas} aria-hidden="true"></canvas>
        ${isShown && html`<i class="cursor" style=${{ left: `${place}px` }}></i>`}
        ${held >= 0 && isShown && html`<i class="held" style=${{ left: `${xOf(placeOf(axis, Math.min(held, cursor)))}px`, width: `${Math.abs(place - xOf(placeOf(axis, held)))}px` }}></i>`}
        ${pointed && isShown && (nearby.length > 0 || series.length > 1 || axis.many) && html`<div class="tip marked ${axis.many ? "many" : ""}" style=${place > width / 2 ? { right: `${width - place + 8}px` } : { left: `${place + 8}px` }}>
          ${axis.many ? series.map((one, i) => values[i] && html`<div key=${one.key}><${Swatch} one=${one} place=${i} theme=${theme} /><b>${values[i]}</b> ${one.name}</div>`)
            : series.length > 1 && namedValues(series, values).map((text) => html`<div key=${text}><b>${text}</b></div>`)}
          ${nearby.slice(-MOST_TOLD).map((text, i) => html`<div key=${i}>${text}</div>`)}
          ${nearby.length > MOST_TOLD && html`<div class="dim">and ${count(nearby.length - MOST_TOLD)} more</div>`}</div>`}
      </div>
    </figure>`;
}

/** Place of a step on the axis. @param {Axis} axis @param {number} step */
const placeOf = (axis, step) => axis.at[Math.max(0, lastNotAbove(axis.step, step))];

/** @param {number[]} sorted @param {number} value */
function nearest(sorted, value) {
  const below = Math.max(0, lastNotAbove(sorted, value));
  return below + 1 < sorted.length && sorted[below + 1] - value < value - sorted[below] ? below + 1 : below;
}

/** A part of the steps around one of them; all of them for ``reach`` 1. @param {number[]} steps @returns {Range | null} */
function closer(steps, index, reach) {
  const around = Math.max(2, Math.floor(steps.length * reach));
  if (around >= steps.length) return null;
  return { first: steps[Math.max(0, index - around)], last: steps[Math.min(steps.length - 1, index + around)] };
}

/** The value of each series at a step, or the last one before; "" before its first, and behind the end of a curve. @param {Series[]} series @returns {string[]} */
function valuesAt(series, step, show) {
  return series.map(({ step: steps, values, raw, points }) => {
    const index = lastNotAbove(steps, step);
    return index < 0 || (!points && step > steps.at(-1)) ? "" : show((raw ?? values)[index]);
  });
}

/** @param {Series[]} series @param {string[]} values */
const namedValues = (series, values) => series.map(({ name }, i) => (values[i] ? `${name} ${values[i]}` : "")).filter(Boolean);

/** The newest value, and its step if later ones have none. */
function newest(axis, [{ step, values, raw }], show, zoomed) {
  const shown = raw ?? values;
  const last = shown.findLastIndex((value) => value !== null && value !== undefined);
  const isNow = last === shown.length - 1 && step.at(-1) === axis.step.at(-1);
  if (last < 0 || (isNow && !zoomed)) return `now ${show(shown[last])}`;
  return `${zoomed ? "" : "last "}${show(shown[last])}, step ${count(step[last])}`;
}

/** Names of several series, in their colours. */
const Names = ({ series, theme }) => html`<small class="names">${series.map(({ name }, i) => html`
  <span key=${name}><${Swatch} one=${series[i]} place=${i} theme=${theme} />${name}</span>`)}</small>`;

/** Colour and kind of line of a curve. @param {{one: {colour?: number, dashed?: boolean}, place: number, theme: import("./colours.js").Theme}} props */
export function Swatch({ one, place, theme }) {
  const colour = seriesColour(inkOf(theme), one, place);
  const stripes = `repeating-linear-gradient(90deg, ${colour} 0 3px, transparent 3px 5px)`;
  return html`<i class="swatch" style=${{ background: one.dashed ? stripes : colour }}></i>`;
}

/** Downloads of a chart, as it is shown. */
function Save(drawn) {
  const menu = useRef(null);
  const as = (kind) => () => {
    menu.current.open = false;
    save(kind, drawn);
  };
  return html`<details class="save" ref=${menu}><summary title="Download this chart" aria-label="Download: ${drawn.title}">⤓</summary>
    <div>${["PNG", "SVG", "CSV"].map((kind) => html`<button key=${kind} onClick=${as(kind)}>${kind}</button>`)}</div></details>`;
}

/** A context of a canvas of this size in the page's pixels. @param {HTMLCanvasElement} canvas */
function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}
