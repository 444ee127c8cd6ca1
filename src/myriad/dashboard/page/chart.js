/**
 * One curve over the run's steps, with its events as marks. All charts share a cursor and a stretch of steps:
 * drag to look closer, double-click for all; arrow keys move the cursor.
 *
 * @typedef {{from: number, to: number}} Stretch indices into the steps
 */

import { count } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { lastNotAbove } from "./sorted.js";
import { useSize } from "./theme.js";

const INK = {
  light: { axis: "#5d6875", grid: "#e6eaef", line: "#1f5fa8", mark: "#b45309" },
  dark: { axis: "#9aa6b4", grid: "#28323c", line: "#7fb0e6", mark: "#f0a35e" },
};
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 6, 20];
const [MOST_TICKS, MOST_DIGITS] = [12, 6];

/**
 * @param {object} props
 * @param {string} props.title @param {number[]} props.at steps, ascending @param {(number | null)[]} props.values
 * @param {(value: number | null | undefined, more?: number) => string} props.show ``more``: digits beyond the usual
 * @param {{at: number, text: string, label?: string}[]} props.marks ``label``: shown beside the mark
 * @param {number} props.cursor index of a step; -1: none @param {(index: number) => void} props.onCursor
 * @param {Stretch} props.stretch @param {(stretch: Stretch | null) => void} props.onStretch
 * @param {import("./colours.js").Theme} props.theme
 */
export function Chart({ title, at, values, show, marks, cursor, onCursor, stretch, onStretch, theme }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const [held, setHeld] = useState(-1);
  const { width, height } = useSize(box);
  const room = width - LEFT - RIGHT;
  const xOf = (step) => LEFT + ((step - at[stretch.from]) / Math.max(1, at[stretch.to] - at[stretch.from])) * room;
  useLayoutEffect(() => {
    if (width && at.length) drawCurve(canvas.current, { width, height, at, values, show, marks, stretch, xOf, ink: INK[theme] });
  }, [width, height, at, values, marks, stretch, theme]);
  useEffect(() => {
    if (cursor >= at.length) onCursor(-1);
  }, [at]);

  const indexAt = (event) => {
    const share = (event.clientX - box.current.getBoundingClientRect().left - LEFT) / room;
    const step = at[stretch.from] + share * (at[stretch.to] - at[stretch.from]);
    return Math.max(stretch.from, Math.min(stretch.to, lastNotAbove(at, step + 0.5)));
  };
  const release = (event) => {
    const [from, to] = [Math.min(held, indexAt(event)), Math.max(held, indexAt(event))];
    setHeld(-1);
    if (held >= 0 && to - from > 2) onStretch({ from, to });
  };
  const onKey = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") onStretch(null);
    else if (by) onCursor(Math.max(stretch.from, Math.min(stretch.to, (cursor < 0 ? stretch.to : cursor) + by)));
    else return;
    event.preventDefault();
  };
  const shown = cursor >= 0 && cursor < at.length ? cursor : -1;
  const last = values.findLastIndex((value) => value !== null && value !== undefined);
  const isNow = last === values.length - 1 || last < 0;
  const said = shown >= 0 ? `step ${count(at[shown])}: ${show(values[shown])}` : isNow ? `now ${show(values[last])}` : `last ${show(values[last])}, step ${count(at[last])}`;
  const nearby = marks.filter((mark) => shown >= 0 && Math.abs(xOf(mark.at) - xOf(at[shown])) < 6).map((mark) => mark.text);

  return html`
    <figure class="card chart">
      <figcaption>${title}<span>${nearby[0]}</span><b>${said}</b></figcaption>
      <div class="plot" ref=${box} tabindex="0" role="application" aria-roledescription="chart" aria-label="${title}, ${said}" onKeyDown=${onKey}
        onPointerMove=${(event) => onCursor(indexAt(event))} onPointerLeave=${() => onCursor(-1)} onDblClick=${() => onStretch(null)}
        onPointerDown=${(event) => {
          box.current.setPointerCapture(event.pointerId);
          setHeld(indexAt(event));
        }} onPointerUp=${release} onPointerCancel=${() => setHeld(-1)}>
        <canvas ref=${canvas} aria-hidden="true"></canvas>
        ${shown >= stretch.from && shown <= stretch.to && html`<i class="cursor" style=${{ left: `${xOf(at[shown])}px` }}></i>`}
        ${held >= 0 && shown >= 0 && html`<i class="held" style=${{ left: `${xOf(at[Math.min(held, shown)])}px`, width: `${Math.abs(xOf(at[shown]) - xOf(at[held]))}px` }}></i>`}
      </div>
    </figure>`;
}

function drawCurve(canvas, { width, height, at, values, show, marks, stretch, xOf, ink }) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  Object.assign(context, { font: FONT, textBaseline: "middle", fillStyle: ink.axis, strokeStyle: ink.grid, lineWidth: 1 });
  const part = values.slice(stretch.from, stretch.to + 1).filter((value) => value !== null && value !== undefined);
  if (!part.length) return context.fillText("not measured", LEFT, height / 2);
  const { low, high, step } = niceRange(part);
  const yOf = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
  drawAxes(context, { width, height, low, high, step, show, yOf, at, stretch, xOf });
  drawMarks(context, marks, at, stretch, xOf, height, ink.mark);
  Object.assign(context, { strokeStyle: ink.line, lineWidth: 1.5, lineJoin: "round" });
  context.beginPath();
  const isThere = (i) => i >= stretch.from && i <= stretch.to && values[i] !== null && values[i] !== undefined;
  for (let i = stretch.from; i <= stretch.to; i++) {
    if (!isThere(i)) continue;
    const [x, y] = [xOf(at[i]), yOf(values[i])];
    if (isThere(i - 1)) context.lineTo(x, y);
    else context.moveTo(x, y);
    // One without neighbours is no line: a dot.
    if (!isThere(i - 1) && !isThere(i + 1)) context.arc(x, y, 1.5, 0, 2 * Math.PI);
  }
  context.stroke();
}

/** Room for nearly all values: a first loss or one slow step may leave at the top. @param {number[]} part */
export function niceRange(part) {
  const sorted = Float64Array.from(part).sort();
  const bottom = sorted[0];
  const usual = sorted[Math.floor((sorted.length - 1) * 0.98)];
  const top = sorted.at(-1) > usual + 2 * (usual - bottom) ? usual + (usual - bottom) * 0.3 : sorted.at(-1);
  // A difference that is lost in a number's own precision is none.
  const span = top - bottom > Math.abs(top) * 1e-9 ? top - bottom : Math.abs(top) || 1;
  const power = 10 ** Math.floor(Math.log10(span / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= span / 3.001);
  return { low: Math.floor(bottom / step + 1e-9) * step, high: Math.max(top + span * 0.06, bottom + step), step };
}

function drawAxes(context, { width, height, low, high, step, show, yOf, at, stretch, xOf }) {
  context.textAlign = "right";
  context.beginPath();
  const ticks = ticksOf(low, high, step);
  const texts = tickTexts(ticks, show);
  for (const [i, value] of ticks.entries()) {
    const y = Math.round(yOf(value)) + 0.5;
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.fillText(texts[i], LEFT - 6, Math.max(y, 6), LEFT - 8);
  }
  context.stroke();
  const places = Math.max(1, Math.floor((width - LEFT) / 90));
  for (let i = 0; i <= places; i++) {
    const index = Math.round(stretch.from + ((stretch.to - stretch.from) * i) / places);
    context.textAlign = i === places ? "right" : i ? "center" : "left";
    if (i === 0 || index !== stretch.from) context.fillText(count(at[index]), xOf(at[index]), height - BOTTOM / 2);
  }
}

/** @param {number} low @param {number} high @param {number} step @returns {number[]} */
export function ticksOf(low, high, step) {
  const number = Math.min(MOST_TICKS, Math.floor((high - low) / step + 1e-6) + 1);
  const values = Array.from({ length: number }, (_, i) => low + i * step);
  return values.map((value) => (Math.abs(value) < step * 1e-6 ? 0 : value));
}

/** With as many digits as it takes that no two look alike. @param {number[]} ticks @param {(value: number, more?: number) => string} show */
export function tickTexts(ticks, show) {
  for (let more = 0; ; more++) {
    const texts = ticks.map((value) => show(value, more));
    if (more === MOST_DIGITS || new Set(texts).size === texts.length) return texts;
  }
}

function drawMarks(context, marks, at, stretch, xOf, height, colour) {
  context.strokeStyle = colour;
  context.setLineDash([3, 3]);
  context.beginPath();
  for (const mark of marks) {
    if (mark.at < at[stretch.from] || mark.at > at[stretch.to]) continue;
    const x = Math.round(xOf(mark.at)) + 0.5;
    context.moveTo(x, TOP);
    context.lineTo(x, height - BOTTOM);
    if (mark.label) {
      Object.assign(context, { textAlign: "left", fillStyle: colour });
      context.fillText(mark.label, x + 3, height - BOTTOM - 7);
    }
  }
  context.stroke();
  context.setLineDash([]);
}
