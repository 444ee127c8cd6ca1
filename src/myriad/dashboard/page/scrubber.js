/**
 * The run as a strip: the deviation of its worst rank in each step, and the window of steps that is shown. The
 * window is dragged, or moved by its two handles, which are sliders for the keyboard.
 */

import { stopsOf } from "./colours.js";
import { count } from "./format.js";
import { html, useLayoutEffect, useRef } from "./html.js";
import { useSize } from "./theme.js";

const HEIGHT = 44;

/**
 * @param {object} props
 * @param {any} props.steps ``step``, and the deviation of the worst rank in each
 * @param {{ofStep: string, usual: number, full: number}} props.measure
 * @param {number} props.from first step of the run @param {number} props.to its last
 * @param {number} props.first of the window @param {number} props.last
 * @param {(first: number, last: number) => void} props.onChange
 * @param {import("./colours.js").Theme} props.theme
 */
export function Scrubber({ steps, measure, from, to, first, last, onChange, theme }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const drag = useRef(null);
  const { width } = useSize(box);
  const total = Math.max(1, to - from + 1);
  const xOf = (step) => ((step - from) / total) * width;
  const move = (a, b) => onChange(Math.max(from, Math.min(a, b)), Math.min(to, Math.max(a, b)));
  const slide = (by) => {
    const held = Math.max(from - first, Math.min(to - last, by));
    onChange(first + held, last + held);
  };

  useLayoutEffect(() => {
    if (width) drawScores(canvas.current, width, steps, measure, from, total, theme);
  }, [width, steps, measure, from, total, theme]);

  const stepAt = (event) => from + Math.floor(((event.clientX - box.current.getBoundingClientRect().left) / width) * total);
  const begin = (event) => {
    const at = stepAt(event);
    const size = last - first;
    const handle = event.target.dataset.handle;
    let [a, b] = [first, last];
    if (!handle && (at < first || at > last)) {
      a = Math.max(from, Math.min(to - size, at - (size >> 1)));
      b = a + size;
      onChange(a, b);
    }
    drag.current = { handle, at, first: a, last: b };
    box.current.setPointerCapture(event.pointerId);
  };
  const follow = (event) => {
    const held = drag.current;
    if (!held) return;
    const by = Math.max(from - held.first, Math.min(to - held.last, stepAt(event) - held.at));
    if (held.handle === "first") move(Math.min(stepAt(event), held.last), held.last);
    else if (held.handle === "last") move(held.first, Math.max(stepAt(event), held.first));
    else onChange(held.first + by, held.last + by);
  };
  const onKey = (which) => (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[event.key];
    if (event.key === "Home") slide(from - first);
    else if (event.key === "End") slide(to - last);
    else if (jump && event.shiftKey) slide(jump);
    else if (jump && which === "first") move(Math.min(first + jump, last), last);
    else if (jump) move(first, Math.max(last + jump, first));
    else return;
    event.preventDefault();
  };
  const handle = (which, value, x) => html`
    <div class="handle" data-handle=${which} style=${{ left: `${x}px` }} role="slider" tabindex="0" onKeyDown=${onKey(which)}
      aria-label="${which === "first" ? "First" : "Last"} step shown" aria-valuemin=${from} aria-valuemax=${to} aria-valuenow=${value}></div>`;
  const [left, right] = [xOf(first), Math.max(xOf(last + 1), xOf(first) + 2)];

  return html`
    <div class="scrubber" ref=${box} onPointerDown=${begin} onPointerMove=${follow}
      onPointerUp=${() => (drag.current = null)} onPointerCancel=${() => (drag.current = null)}
      title="Deviation of the worst rank in each step. Drag the window, or move it with Shift and the arrow keys.">
      <canvas ref=${canvas}></canvas>
      <div class="window" style=${{ left: `${left}px`, width: `${right - left}px` }}></div>
      ${handle("first", first, left)}${handle("last", last, right)}
      <span class="edge">step ${count(from)}</span><span class="edge right">${count(to)}</span>
    </div>`;
}

/** A column of pixels shows the worst of its steps. */
function drawScores(canvas, width, steps, measure, from, total, theme) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  if (!steps) return;
  const worst = new Float32Array(width);
  const values = steps[measure.ofStep];
  for (let i = 0; i < steps.step.length; i++) {
    const begin = Math.floor(((steps.step[i] - from) / total) * width);
    const end = Math.max(begin + 1, Math.floor(((steps.step[i] + 1 - from) / total) * width));
    for (let x = begin; x < end; x++) if (values[i] > worst[x]) worst[x] = values[i];
  }
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const stops = stopsOf("z", theme);
  const tints = [stops[stops.length >> 1], stops[4], stops[5], stops[6]];
  for (let x = 0; x < width; x++) {
    const share = Math.min(1, worst[x] / measure.full);
    context.fillStyle = worst[x] < measure.usual ? (theme === "dark" ? "#5a6675" : "#b4bdc8") : tints[share > 0.8 ? 3 : share > 0.45 ? 2 : 1];
    const high = Math.max(1, share * (HEIGHT - 16));
    context.fillRect(x, HEIGHT - high, 1, high);
  }
}
