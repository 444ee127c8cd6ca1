/** The raster with all that a person does on it: hover, arrow keys, a click. */

import { neighbour, rankUnder } from "./arrange.js";
import { paintValues } from "./colours.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { Raster } from "./raster.js";

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * @param {object} props
 * @param {import("./arrange.js").Arrangement} props.arrangement
 * @param {ArrayLike<number>} props.values one a rank
 * @param {[number, number]} props.domain
 * @param {"z" | "ms"} props.scale @param {import("./colours.js").Theme} props.theme
 * @param {number} props.pixels device pixels of a page's
 * @param {number} props.selected @param {(rank: number) => void} props.onSelect @param {(rank: number) => void} props.onOpen
 * @param {(rank: number) => string[]} props.describe lines on a rank
 */
export function HeatMap(props) {
  const { arrangement, values, domain, scale, theme, pixels, selected, onSelect, onOpen, describe } = props;
  const canvas = useRef(null);
  const raster = useRef(null);
  const [hovered, setHovered] = useState(-1);
  const [spoken, setSpoken] = useState("");

  useLayoutEffect(() => {
    raster.current ??= new Raster(canvas.current);
    raster.current.arrange(arrangement, pixels);
  }, [arrangement, pixels]);
  useLayoutEffect(() => {
    const colours = new Uint32Array(arrangement.cells.length);
    paintValues(values, domain, scale, theme, colours);
    raster.current.paint(colours);
    performance.mark("myriad:map");
  }, [arrangement, pixels, values, domain, scale, theme]);
  useEffect(() => {
    if (document.activeElement?.contains(canvas.current)) setSpoken(describe(selected).join(", "));
  }, [selected]);

  const rankAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return rankUnder(arrangement, (event.clientX - box.left) * pixels, (event.clientY - box.top) * pixels);
  };
  const onKey = (event) => {
    const rank = move(arrangement, selected, event);
    if (event.key === "Enter" && selected >= 0) onOpen(selected);
    else if (rank >= 0) onSelect(rank);
    else return;
    event.preventDefault();
  };
  const shown = hovered >= 0 ? hovered : selected;

  return html`
    <div class="map">
      <div class="bands" aria-hidden="true">${labelled(arrangement, pixels)}</div>
      <div class="cells" tabindex="0" role="application" aria-roledescription="heat map" aria-describedby="map-keys"
        aria-label="All ranks. ${describe(selected).join(", ")}" onKeyDown=${onKey}
        onFocus=${() => selected < 0 && onSelect(0)}>
        <canvas ref=${canvas} onPointerMove=${(event) => setHovered(rankAt(event))} onPointerLeave=${() => setHovered(-1)}
          onClick=${(event) => rankAt(event) >= 0 && onOpen(rankAt(event))}></canvas>
        ${selected >= 0 && html`<${Mark} kind="selected" arrangement=${arrangement} pixels=${pixels} rank=${selected} />`}
        ${hovered >= 0 && html`<${Mark} kind="hovered" arrangement=${arrangement} pixels=${pixels} rank=${hovered} />`}
        ${hovered >= 0 && html`<${Tip} arrangement=${arrangement} pixels=${pixels} rank=${shown} lines=${describe(shown)} />`}
      </div>
      <p class="unseen" id="map-keys">Arrow keys move by a cell, Page Up and Page Down by a block, Enter opens the timeline.</p>
      <p class="unseen" aria-live="polite">${spoken}</p>
    </div>`;
}

/** @returns {number} where a key leads; -1: nowhere */
function move(arrangement, selected, { key }) {
  if (MOVES[key]) return neighbour(arrangement, Math.max(selected, 0), MOVES[key][0], MOVES[key][1]);
  if (key === "PageDown" || key === "PageUp") {
    const rows = key === "PageDown" ? arrangement.bandRows : -arrangement.bandRows;
    return neighbour(arrangement, Math.max(selected, 0), 0, rows);
  }
  if (key === "Home") return 0;
  return key === "End" ? arrangement.cells.length - 1 : -1;
}

/** @returns {{x: number, y: number, wide: number, high: number}} in the page's pixels */
function boxOf({ cells, columns, xs, ys, cellWidth, cellHeight }, rank, pixels) {
  const cell = cells[rank];
  const [row, column] = [Math.floor(cell / columns), cell % columns];
  return { x: xs[column] / pixels, y: ys[row] / pixels, wide: cellWidth / pixels, high: cellHeight / pixels };
}

function Mark({ kind, arrangement, pixels, rank }) {
  const { x, y, wide, high } = boxOf(arrangement, rank, pixels);
  const style = { transform: `translate(${x}px, ${y}px)`, width: `${wide}px`, height: `${high}px` };
  return html`<div class="mark ${kind}" style=${style}></div>`;
}

function Tip({ arrangement, pixels, rank, lines }) {
  const { x, y, wide, high } = boxOf(arrangement, rank, pixels);
  const right = x > arrangement.width / pixels - 270;
  const below = y < 90;
  const style = {
    left: right ? "auto" : `${x + wide + 8}px`,
    right: right ? `${arrangement.width / pixels - x + 8}px` : "auto",
    top: below ? `${y + high + 6}px` : "auto",
    bottom: below ? "auto" : `${arrangement.height / pixels - y + 6}px`,
  };
  return html`<div class="tip" style=${style}>${lines.map((line, i) => (i ? html`<div>${line}</div>` : html`<b>${line}</b>`))}</div>`;
}

/** Bands' names, as many as are readable. @param {import("./arrange.js").Arrangement} arrangement */
function labelled({ bands, ys }, pixels) {
  let free = -Infinity;
  return bands.map(({ row, text }) => {
    const y = ys[row] / pixels;
    if (y < free) return null;
    free = y + 13;
    return html`<span key=${row} style=${{ top: `${y}px` }} title=${text}>${text}</span>`;
  });
}
