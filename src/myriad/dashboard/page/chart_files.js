/** Downloads of a chart: the picture as PNG or SVG, with its title, or what it shows as a table. */

import { drawChart, inkOf, seriesColour } from "./chart_paint.js";

const [WIDTH, HEIGHT, TITLE, SCALE] = [900, 380, 34, 2];

/**
 * @param {"PNG" | "SVG" | "CSV"} kind
 * @param {{title: string, theme: import("./colours.js").Theme} & Record<string, any>} drawn what `drawChart` takes
 */
export function save(kind, drawn) {
  const name = `${drawn.title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "") || "chart"}.${kind.toLowerCase()}`;
  const address = { PNG: pngOf, SVG: (what) => `data:image/svg+xml,${encodeURIComponent(svgOf(what))}`, CSV: (what) => `data:text/csv,${encodeURIComponent(csvOf(what))}` }[kind](drawn);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
}

function pngOf(drawn) {
  const canvas = Object.assign(document.createElement("canvas"), { width: WIDTH * SCALE, height: HEIGHT * SCALE });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  draw(context, drawn);
  return canvas.toDataURL("image/png");
}

function draw(context, drawn) {
  const ink = inkOf(drawn.theme);
  context.fillStyle = ink.paper;
  context.fillRect(0, 0, WIDTH, HEIGHT);
  drawChart(context, { ...drawn, width: WIDTH, height: HEIGHT, top: TITLE, ink });
  Object.assign(context, { fillStyle: ink.text, textAlign: "left" });
  context.fillText(`${drawn.title}, by ${drawn.axis.name}`, 12, TITLE / 2);
  let right = WIDTH - 12;
  for (const [i, one] of [...drawn.series.entries()].reverse()) {
    if (drawn.series.length < 2) break;
    Object.assign(context, { fillStyle: seriesColour(ink, one, i), textAlign: "right" });
    context.fillText(one.name, right, TITLE / 2);
    right -= 8 * one.name.length + 16;
  }
}

/** @returns {string} */
export function svgOf(drawn) {
  const context = new SvgContext();
  draw(context, drawn);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" width="${WIDTH}" height="${HEIGHT}" font-family="system-ui, sans-serif" font-size="11">${context.parts.join("")}</svg>`;
}

/** A row for each step of the first series and of each further one. @returns {string} */
export function csvOf({ axis, series, range }) {
  const rows = new Map();
  for (const [i, { step, x, values, raw }] of series.entries()) {
    for (const [k, at] of x.entries()) {
      if (at < range[0] || at > range[1]) continue;
      if (!rows.has(step[k])) rows.set(step[k], [at, ...series.map(() => "")]);
      rows.get(step[k])[i + 1] = (raw ?? values)[k] ?? "";
    }
  }
  // In a chart of several runs, a place stands for no common step.
  const isPlace = axis.many || axis.name === "steps";
  const head = [...(isPlace ? [axis.name === "steps" ? "step" : axis.name] : ["step", axis.name]), ...series.map((one) => one.name)].map(quoted);
  const lines = [...rows.entries()].sort(([a], [b]) => a - b).map(([step, [at, ...values]]) => [step, ...(isPlace ? [] : [at]), ...values]);
  return [head, ...lines].map((line) => line.join(",")).join("\n") + "\n";
}

/** A field that a spreadsheet takes for text, not for a formula. @param {string} text */
const quoted = (text) => (/^[=+\-@]|[",\n]/.test(text) ? `"${text.replace(/^[=+\-@]/, "'$&").replaceAll('"', '""')}"` : text);

const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

/** The calls of a canvas that `drawChart` makes, as SVG. */
class SvgContext {
  constructor() {
    this.parts = [];
    this.path = "";
    this.dash = [];
    this.globalAlpha = 1;
    this.lineWidth = 1;
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${rounded(x)} ${rounded(y)}`;
  }

  lineTo(x, y) {
    this.path += `L${rounded(x)} ${rounded(y)}`;
  }

  /** A whole circle. */
  arc(x, y, radius) {
    this.path += `M${rounded(x - radius)} ${rounded(y)}a${radius} ${radius} 0 1 0 ${2 * radius} 0a${radius} ${radius} 0 1 0 ${-2 * radius} 0`;
  }

  setLineDash(dash) {
    this.dash = dash;
  }

  stroke() {
    if (!this.path) return;
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    this.parts.push(`<path d="${this.path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-linejoin="round" opacity="${this.globalAlpha}"${dash}/>`);
  }

  fillRect(x, y, width, height) {
    this.parts.push(`<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="${this.fillStyle}"/>`);
  }

  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] ?? "start";
    this.parts.push(`<text x="${rounded(x)}" y="${rounded(y + 4)}" text-anchor="${anchor}" fill="${this.fillStyle}">${escaped(text)}</text>`);
  }
}

const rounded = (value) => Math.round(value * 10) / 10;
