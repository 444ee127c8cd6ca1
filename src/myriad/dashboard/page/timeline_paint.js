/**
 * A timeline on a canvas. Spans are written as pixels, a line for each lane that is copied down, so thousands of
 * lanes cost a few milliseconds also where no GPU helps; text and arrows, of which few are readable at a time, are
 * drawn over them.
 *
 * @typedef {{start: number, end: number, top: number, zoom: number}} Viewport  time window in seconds, scroll in pixels
 * @typedef {{tops: Float64Array, heights: Float64Array, total: number}} Geometry
 */

import { mixed, spanColour, word } from "./colours.js";
import { seconds } from "./format.js";
import { firstVisible } from "./lanes.js";
import { lastNotAbove } from "./sorted.js";

export const GUTTER = 96;
export const AXIS = 22;
const MOST_LABELS = 600;
/** Kept free at the right end of the axis. */
const CLOCK_WIDTH = 170;
const MOST_ARROWS = 600;
const INK = {
  light: { back: "#ffffff", idle: "#eff2f5", line: "#d9dfe6", text: "#16202c", dim: "#5d6875", arrow: "#16202c", chosen: "#1f5fa8" },
  dark: { back: "#161c23", idle: "#1f2730", line: "#303b47", text: "#e6eaf0", dim: "#9aa6b4", arrow: "#e6eaf0", chosen: "#8fc0f5" },
};
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

/**
 * Where lanes lie: as high as the area lets them at zoom 1, a predicted one half as high.
 * @param {import("./lanes.js").Lane[]} lanes @returns {Geometry}
 */
export function laneGeometry(lanes, room, zoom) {
  const weight = lanes.reduce((sum, lane) => sum + (lane.predicted ? 0.55 : 1), 0);
  const unit = Math.max(1, Math.min(30, room / Math.max(weight, 1)) * zoom);
  const tops = new Float64Array(lanes.length);
  const heights = new Float64Array(lanes.length);
  let total = 0;
  lanes.forEach((lane, i) => {
    tops[i] = total;
    heights[i] = lane.predicted ? 0.55 * unit : unit;
    total += heights[i];
  });
  return { tops, heights, total };
}

/** Lane at a height of the content, or -1. @param {Geometry} geometry */
export function laneUnder({ tops, total }, y) {
  return y < 0 || y >= total ? -1 : lastNotAbove(tops, y);
}

export class TimelinePaint {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  /** @param {number} width @param {number} height page's pixels @param {number} scale device pixels of one */
  resize(width, height, scale) {
    Object.assign(this, { width, height, scale });
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.wide = Math.max(1, Math.round((width - GUTTER) * scale));
    this.high = Math.max(1, Math.round((height - AXIS) * scale));
    this.image = this.context.createImageData(this.wide, this.high);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.line = new Uint32Array(this.wide);
  }

  /**
   * @param {import("./lanes.js").Lanes} data @param {Geometry} geometry @param {Viewport} viewport
   * @param {{theme: import("./colours.js").Theme, selected: number, arrows: boolean, clockError: number}} options
   */
  draw(data, geometry, viewport, options) {
    const ink = INK[options.theme];
    const first = Math.max(0, laneUnder(geometry, viewport.top));
    const below = laneUnder(geometry, viewport.top + this.height - AXIS);
    const last = below < 0 ? data.lanes.length - 1 : below;
    const frame = { data, geometry, viewport, ink, first, last, options, perSecond: (this.width - GUTTER) / (viewport.end - viewport.start) };
    this.writeSpans(frame);
    const { context } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = ink.back;
    context.fillRect(0, 0, this.canvas.width, AXIS * this.scale);
    context.fillRect(0, 0, GUTTER * this.scale, this.canvas.height);
    context.putImageData(this.image, Math.round(GUTTER * this.scale), Math.round(AXIS * this.scale));
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    this.drawAxis(frame);
    this.drawGutter(frame);
    this.drawLabels(frame);
    if (options.arrows) this.drawArrows(frame);
    if (options.clockError > 0) this.drawClockError(frame);
  }

  writeSpans({ data, geometry, viewport, ink, first, last, options, perSecond }) {
    const { pixels, line, wide, high, scale } = this;
    const colours = spanWords(data.names, options.theme, ink.idle);
    const perPixel = perSecond * scale;
    pixels.fill(word(ink.back));
    for (let at = first; at <= last; at++) {
      const lane = data.lanes[at];
      const top = Math.round((geometry.tops[at] - viewport.top) * scale);
      const bottom = Math.round((geometry.tops[at] + geometry.heights[at] - viewport.top) * scale);
      const gap = bottom - top >= 6 ? Math.round((bottom - top) * 0.14) : bottom - top >= 3 ? 1 : 0;
      const [from, to] = [Math.max(0, top), Math.min(high, bottom - gap)];
      if (from >= to) continue;
      line.fill(word(ink.idle));
      this.writeLane(data, lane, viewport, perPixel, lane.predicted ? colours.pale : colours.full, wide);
      for (let y = from; y < to; y++) pixels.set(line, y * wide);
    }
  }

  /** One line of a lane; what is shorter than a pixel still gets one. */
  writeLane(data, lane, viewport, perPixel, colours, wide) {
    const { line } = this;
    for (let i = firstVisible(data, lane, viewport.start); i < lane.to; i++) {
      const begin = (data.start[i] - viewport.start) * perPixel;
      if (begin >= wide) break;
      const left = begin < 0 ? 0 : begin | 0;
      const end = (data.stop[i] - viewport.start) * perPixel;
      let right = end > wide ? wide : end | 0;
      // A line between neighbours, where there is room.
      if (right - left > 5) right--;
      else if (right <= left) right = left + 1;
      const colour = colours[data.name[i]];
      for (let x = left; x < right; x++) line[x] = colour;
    }
  }

  drawAxis({ viewport, ink, perSecond }) {
    const { context, width, height } = this;
    const step = niceStep((viewport.end - viewport.start) / ((width - GUTTER) / 110));
    context.strokeStyle = ink.line;
    context.fillStyle = ink.dim;
    context.textAlign = "left";
    context.lineWidth = 1;
    context.beginPath();
    for (let at = Math.ceil(viewport.start / step) * step; at < viewport.end; at += step) {
      const x = Math.round(GUTTER + (at - viewport.start) * perSecond) + 0.5;
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      if (x < width - CLOCK_WIDTH) context.fillText(timeText(at, step), x + 3, AXIS / 2);
    }
    context.globalAlpha = 0.55;
    context.stroke();
    context.globalAlpha = 1;
  }

  drawGutter({ data, geometry, viewport, ink, first, last, options }) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.width, this.height - AXIS);
    context.clip();
    context.textAlign = "right";
    let free = -Infinity;
    for (let at = first; at <= last; at++) {
      const lane = data.lanes[at];
      const chosen = lane.rank === options.selected && !lane.predicted;
      const y = Math.max(AXIS + 6, AXIS + geometry.tops[at] - viewport.top + geometry.heights[at] * 0.45);
      if (chosen) this.drawChosen(geometry, viewport, ink, at);
      if (y < free && !chosen) continue;
      if (lane.predicted && geometry.heights[at] < 11) continue;
      context.fillStyle = chosen ? ink.chosen : lane.predicted ? ink.dim : ink.text;
      const text = lane.predicted ? "predicted" : lane.worstOf > 1 ? `${lane.rank} (of ${lane.worstOf})` : `rank ${lane.rank}`;
      context.fillText(text, GUTTER - 8, y);
      free = y + 12;
    }
    context.restore();
  }

  drawChosen(geometry, viewport, ink, at) {
    const { context } = this;
    context.strokeStyle = ink.chosen;
    context.lineWidth = 2;
    const high = Math.max(4, geometry.heights[at]);
    context.strokeRect(GUTTER - 3, AXIS + geometry.tops[at] - viewport.top - 1, this.width - GUTTER + 2, high);
  }

  /** Names and micro-batches where they fit; each lane has its share of what a frame may cost. */
  drawLabels({ data, geometry, viewport, first, last, perSecond }) {
    const { context } = this;
    const share = Math.ceil(MOST_LABELS / (last - first + 1));
    context.textAlign = "left";
    for (let at = first; at <= last; at++) {
      const lane = data.lanes[at];
      const y = AXIS + geometry.tops[at] - viewport.top + geometry.heights[at] * 0.45;
      if (geometry.heights[at] < 13 || lane.predicted || y < AXIS + 5) continue;
      let left = share;
      for (let i = firstVisible(data, lane, viewport.start); i < lane.to && left > 0 && data.start[i] < viewport.end; i++) {
        // As far as the span is seen: up to one that lies in it.
        const stop = i + 1 < lane.to ? Math.min(data.stop[i], data.start[i + 1]) : data.stop[i];
        const begin = Math.max(GUTTER, GUTTER + (data.start[i] - viewport.start) * perSecond);
        const room = Math.min(this.width, GUTTER + (stop - viewport.start) * perSecond) - begin - 4;
        if (room < 14) continue;
        const name = data.names[data.name[i]];
        const text = labelOf(name, data.microBatch[i], room);
        if (!text) continue;
        context.fillStyle = inkOn(name);
        context.fillText(text, begin + 3, y);
        left--;
      }
    }
  }

  /** Draw arrows from the rank that was waited for to the rank that waited; those of the selected rank are highlighted. */
  drawArrows({ data, geometry, viewport, ink, options, perSecond }) {
    const { context } = this;
    const { fromRank, toRank, fromAt, toAt, kind } = data.arrows;
    if (!fromRank) return;
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.height - AXIS);
    context.clip();
    const middle = (rank) => {
      const lane = data.laneOf.get(rank);
      return lane === undefined ? NaN : AXIS + geometry.tops[lane] + geometry.heights[lane] * 0.43 - viewport.top;
    };
    const mine = [];
    const others = [];
    for (let i = 0; i < fromRank.length; i++) {
      if (toAt[i] < viewport.start || fromAt[i] > viewport.end || fromRank[i] === toRank[i]) continue;
      const [y0, y1] = [middle(fromRank[i]), middle(toRank[i])];
      if (!(Math.max(y0, y1) > AXIS && Math.min(y0, y1) < this.height)) continue;
      const [x0, x1] = [fromAt[i], toAt[i]].map((at) => GUTTER + (at - viewport.start) * perSecond);
      (fromRank[i] === options.selected ? mine : others).push([x0, y0, x1, y1, kind[i]]);
    }
    // Too many arrows are unreadable: then only those of the selected rank are drawn.
    context.globalAlpha = mine.length ? 0.28 : 0.5;
    if (others.length <= (mine.length ? MOST_ARROWS / 4 : MOST_ARROWS)) this.strokeArrows(others, ink.arrow, 1);
    context.globalAlpha = 1;
    this.strokeArrows(mine.slice(0, MOST_ARROWS), ink.chosen, 1.6);
    context.restore();
  }

  /** Send to receive as a full line, the last arriver of a collective as a dashed one. */
  strokeArrows(arrows, colour, lineWidth) {
    const { context } = this;
    Object.assign(context, { strokeStyle: colour, fillStyle: colour, lineWidth });
    for (const dashed of [0, 1]) {
      context.beginPath();
      context.setLineDash(dashed ? [4, 3] : []);
      for (const [x0, y0, x1, y1, kind] of arrows) {
        if (kind !== dashed) continue;
        const bend = Math.max(6, Math.min(40, Math.abs(x1 - x0) / 2));
        context.moveTo(x0, y0);
        context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      }
      context.stroke();
    }
    context.setLineDash([]);
    context.beginPath();
    for (const [, , x1, y1] of arrows) {
      context.moveTo(x1 + 1, y1);
      context.lineTo(x1 - 5, y1 - 3);
      context.lineTo(x1 - 5, y1 + 3);
    }
    context.fill();
  }

  /** How far clocks of two nodes may be apart, in the scale of the axis. */
  drawClockError({ ink, perSecond, options }) {
    const { context, width } = this;
    const wide = Math.min(2 * options.clockError * perSecond, width - GUTTER - 20);
    const text = `clocks ± ${seconds(options.clockError)}`;
    const right = width - 10;
    const textWidth = context.measureText(text).width;
    context.fillStyle = ink.back;
    context.fillRect(right - Math.max(wide, textWidth) - 6, 0, Math.max(wide, textWidth) + 16, AXIS - 1);
    context.strokeStyle = ink.text;
    context.lineWidth = 1;
    context.beginPath();
    for (const x of [right - wide, right]) {
      context.moveTo(x + 0.5, AXIS - 7);
      context.lineTo(x + 0.5, AXIS - 1);
    }
    context.moveTo(right - wide, AXIS - 3.5);
    context.lineTo(right, AXIS - 3.5);
    context.stroke();
    context.fillStyle = ink.dim;
    context.textAlign = "right";
    context.fillText(text, right, 8);
  }
}

function spanWords(names, theme, idle) {
  const full = names.map((name) => spanColour(name));
  return { full: Uint32Array.from(full, word), pale: Uint32Array.from(full, (colour) => word(mixed(colour, idle, theme === "dark" ? 0.5 : 0.45))) };
}

const SHORT = { forward: "F", backward: "B", backward_input: "B", backward_weight: "W", paired_backward: "FB" };

function labelOf(name, microBatch, room) {
  const long = microBatch >= 0 ? `${name} ${microBatch}` : name;
  if (long.length * 6.2 < room) return long;
  const short = SHORT[name] && microBatch >= 0 ? `${SHORT[name]}${microBatch}` : "";
  return short.length * 7 < room ? short : "";
}

/** Readable on a span's colour. */
function inkOn(name) {
  if (!inks.has(name)) {
    const colour = word(spanColour(name));
    const light = 0.299 * (colour & 255) + 0.587 * ((colour >> 8) & 255) + 0.114 * ((colour >> 16) & 255);
    inks.set(name, light < 120 ? "#ffffff" : "#10161d");
  }
  return inks.get(name);
}

/** @type {Map<string, string>} */
const inks = new Map();

/** 1, 2 or 5 times a power of ten, at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999) ?? 10 * power;
}

/** Time since the run's first span, as exactly as the step of the axis. */
const timeText = (at, step) => `${at.toFixed(Math.max(0, Math.min(9, Math.ceil(-Math.log10(step) - 1e-9))))} s`;
