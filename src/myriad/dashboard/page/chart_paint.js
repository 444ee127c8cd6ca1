/** Paints a chart on a canvas, or on anything that takes the same calls (`chart_files.js`). */

/** Colours of a theme. Curves of one chart are told apart with any cones (`tests/browser/test_page_colours.py`). */
const INK = {
  light: { paper: "#ffffff", text: "#16202c", axis: "#5d6875", grid: "#e6eaef", mark: "#b45309", bad: "#a8300b", series: ["#1f5fa8", "#e07b00", "#2a9d8f", "#7a1f5c", "#4b3c00"] },
  dark: { paper: "#161c23", text: "#e6eaf0", axis: "#9aa6b4", grid: "#28323c", mark: "#f0a35e", bad: "#ffa37a", series: ["#7fb0e6", "#f2a23c", "#2fb8a4", "#c33c4b", "#c9ced6"] },
};
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 8, 6, 20];
const [MOST_TICKS, MOST_DIGITS] = [12, 6];
const PALE = 0.28;
const DASHES = [5, 3];

/** @param {import("./colours.js").Theme} theme */
export const inkOf = (theme) => INK[theme];

/**
 * @param {any} context @param {object} what
 * @param {number} what.width @param {number} what.height @param {number} [what.top] above the chart, for a title
 * @param {import("./chart.js").Axis} what.axis @param {import("./chart.js").Series[]} what.series
 * @param {(value: number, more?: number) => string} what.show @param {import("./chart.js").Mark[]} what.marks
 * @param {[number, number]} what.range on the axis @param {boolean} what.log @param {any} what.ink
 */
export function drawChart(context, { width, height, top = 0, axis, series, show, marks, range, log, ink }) {
  Object.assign(context, { font: FONT, textBaseline: "middle", fillStyle: ink.axis, strokeStyle: ink.grid, lineWidth: 1 });
  const part = series.flatMap((one) => shownValues(one, range));
  if (!part.length) return context.fillText("not measured", LEFT, top + (height - top) / 2);
  const scale = log && part.some((value) => value > 0) ? logScale(part.filter((value) => value > 0)) : linearScale(part);
  const [high, low] = [top + TOP, height - BOTTOM];
  const yOf = (value) => low - scale.share(value) * (low - high);
  const xOf = (at) => LEFT + ((at - range[0]) / (range[1] - range[0] || 1)) * (width - LEFT - RIGHT);
  drawAxes(context, { width, height, scale, show, yOf, xOf, axis, range });
  drawMarks(context, marks, { range, xOf, high, low, ink });
  for (const [i, one] of series.entries()) {
    const colour = seriesColour(ink, one, i);
    context.setLineDash(one.dashed ? DASHES : []);
    Object.assign(context, { strokeStyle: colour, fillStyle: colour, lineWidth: 1.5, lineJoin: "round" });
    if (one.raw) {
      context.globalAlpha = PALE;
      drawLine(context, one, one.raw, { xOf, yOf, range, scale });
      context.globalAlpha = 1;
    }
    drawLine(context, one, one.values, { xOf, yOf, range, scale });
  }
  context.setLineDash([]);
}

/** Colour of a curve: its own, or the one of its place. @param {any} ink @param {import("./chart.js").Series} one @param {number} place */
export const seriesColour = (ink, one, place) => ink.series[(one.colour ?? place) % ink.series.length];

/** The values that lie in the range, and their neighbours outside of it. @param {import("./chart.js").Series} series @param {[number, number]} range */
function shownValues({ x, values, raw }, [from, to]) {
  const found = [];
  for (let i = 0; i < x.length; i++) {
    if (x[i] < from || x[i] > to) continue;
    for (const list of raw ? [values, raw] : [values]) if (list[i] !== null && list[i] !== undefined) found.push(list[i]);
  }
  return found;
}

/** A curve. A value without neighbours is no line: a dot. */
function drawLine(context, { x, points }, values, { xOf, yOf, range, scale }) {
  const isThere = (i) => i >= 0 && i < x.length && values[i] !== null && values[i] !== undefined && scale.takes(values[i]);
  const from = Math.max(0, x.findIndex((at) => at >= range[0]) - 1);
  context.beginPath();
  for (let i = from; i < x.length && (i === from || x[i - 1] <= range[1]); i++) {
    if (!isThere(i)) continue;
    const [left, y] = [xOf(x[i]), yOf(values[i])];
    if (i > from && isThere(i - 1)) context.lineTo(left, y);
    else context.moveTo(left, y);
    if (points || !(isThere(i - 1) || isThere(i + 1))) {
      context.moveTo(left + (points ? 2.5 : 1.5), y);
      context.arc(left, y, points ? 2.5 : 1.5, 0, 2 * Math.PI);
      context.moveTo(left, y);
    }
  }
  context.stroke();
}

/** @param {number[]} part */
function linearScale(part) {
  const { low, high, step } = niceRange(part);
  return { ticks: ticksOf(low, high, step), share: (value) => (value - low) / (high - low), takes: () => true };
}

/** @param {number[]} part above 0 */
function logScale(part) {
  const sorted = Float64Array.from(part).sort();
  let [low, high] = [Math.log10(sorted[0]), Math.log10(sorted.at(-1))];
  if (high - low < 0.05) [low, high] = [low - 0.05, high + 0.05];
  const pad = (high - low) * 0.05;
  [low, high] = [low - pad, high + pad];
  return { ticks: logTicks(low, high), share: (value) => (Math.log10(value) - low) / (high - low), takes: (value) => value > 0 };
}

/** Powers of ten, with 2 and 5 between them where there are few; plain ticks within less than a factor of three. */
function logTicks(low, high) {
  if (high - low < 0.5) {
    const { low: from, high: to, step } = niceRange([10 ** low, 10 ** high]);
    return ticksOf(from, to, step).filter((value) => value > 0 && Math.log10(value) >= low && Math.log10(value) <= high);
  }
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % every) continue;
    for (const factor of high - low < 2 ? [1, 2, 5] : [1]) found.push(factor * 10 ** power);
  }
  return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
}

/** Room for nearly all values: a first loss or one slow step may leave at the top. @param {number[]} part */
export function niceRange(part) {
  const sorted = Float64Array.from(part).sort();
  const bottom = sorted[0];
  const usual = sorted[Math.floor((sorted.length - 1) * 0.98)];
  const top = sorted.at(-1) > usual + 2 * (usual - bottom) ? usual + (usual - bottom) * 0.3 : sorted.at(-1);
  // A difference that is lost in a number's own precision is none.
  const span = top - bottom > Math.abs(top) * 1e-9 ? top - bottom : Math.abs(top) || 1;
  const step = niceStep(span / 3);
  return { low: Math.floor(bottom / step + 1e-9) * step, high: Math.max(top + span * 0.06, bottom + step), step };
}

/** The least of 1, 2 and 5 times a power of ten that is at least a size. @param {number} size */
export function niceStep(size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= size * 0.999) ?? 10 * power;
}

function drawAxes(context, { width, height, scale, show, yOf, xOf, axis, range }) {
  context.textAlign = "right";
  context.beginPath();
  const texts = tickTexts(scale.ticks, show);
  for (const [i, value] of scale.ticks.entries()) {
    const y = Math.round(yOf(value)) + 0.5;
    context.moveTo(LEFT, y);
    context.lineTo(width - RIGHT, y);
    context.fillText(texts[i], LEFT - 6, Math.max(y, 6), LEFT - 8);
  }
  context.stroke();
  const ticks = axis.ticks(range[0], range[1], Math.max(1, Math.floor((width - LEFT) / 90)));
  const names = tickTexts(ticks, axis.show);
  for (const [i, at] of ticks.entries()) {
    const x = xOf(at);
    context.textAlign = x < LEFT + 20 ? "left" : x > width - RIGHT - 24 ? "right" : "center";
    context.fillText(names[i], x, height - BOTTOM / 2);
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

/** Dashed lines; of checkpoints small triangles on the axis. */
function drawMarks(context, marks, { range, xOf, high, low, ink }) {
  const inside = marks.filter((mark) => mark.at >= range[0] && mark.at <= range[1]);
  for (const [kind, colour] of [["other", ink.mark], ["bad", ink.bad]]) {
    Object.assign(context, { strokeStyle: colour, fillStyle: colour, lineWidth: kind === "bad" ? 1.5 : 1, textAlign: "left" });
    context.setLineDash(kind === "bad" ? [6, 3] : [3, 3]);
    context.beginPath();
    for (const mark of inside.filter((one) => one.kind === kind)) {
      const x = Math.round(xOf(mark.at)) + 0.5;
      context.moveTo(x, high);
      context.lineTo(x, low);
      if (mark.label) context.fillText(mark.label, x + 3, low - 7);
    }
    context.stroke();
  }
  context.setLineDash([]);
  Object.assign(context, { strokeStyle: ink.axis, lineWidth: 1 });
  context.beginPath();
  for (const { at } of inside.filter((one) => one.kind === "checkpoint")) {
    const x = xOf(at);
    context.moveTo(x - 3, low + 0.5);
    context.lineTo(x, low - 5);
    context.lineTo(x + 3, low + 0.5);
  }
  context.stroke();
}

