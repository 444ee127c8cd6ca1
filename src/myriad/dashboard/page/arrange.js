/**
 * Ranks as cells of a matrix, with gaps between blocks: by node (a node is a block), or by the rank grid
 * (a pipeline stage is a band). The largest cells that fit are taken.
 *
 *     by node, 4 ranks each          by grid, pp 2 x tp 2 down, dp 4 across
 *     [0 1] [4 5] [ 8  9]            pp 0  tp 0   0  4  8 12
 *     [2 3] [6 7] [10 11]                  tp 1   1  5  9 13
 *                                    pp 1  tp 0   2  6 10 14
 *
 * @typedef {object} Arrangement
 * @property {number} rows @property {number} columns
 * @property {Int32Array} ranks of each cell, row by row; -1: none
 * @property {Int32Array} cells of each rank
 * @property {Int32Array} xs left edge of each column @property {Int32Array} ys top of each row
 * @property {number} cellWidth @property {number} cellHeight
 * @property {number} width of all @property {number} height
 * @property {{row: number, text: string}[]} bands labels at the left
 * @property {number} bandRows rows of a block
 * @property {string} across what columns are
 */

import { plural } from "./format.js";
import { rankAt, sizeOf } from "./grid.js";
import { lastNotAbove } from "./sorted.js";

const LARGEST_CELL = 64;

/** @param {number} cell */
const gapOf = (cell) => (cell >= 12 ? 4 : cell >= 4 ? 2 : 1);

/**
 * @param {number} world @param {number} nodeSize @param {number} width @param {number} height device pixels
 * @param {string[]} names of nodes @param {number} [scale] device pixels of one that is drawn
 * @returns {Arrangement}
 */
export function byNode(world, nodeSize, width, height, names, scale = 1) {
  const nodes = Math.ceil(world / nodeSize);
  let best = { cell: 0, wide: nodeSize, high: 1, across: 1 };
  for (let wide = 1; wide <= nodeSize; wide++) {
    const high = nodeSize / wide;
    if (wide < high || high % 1) continue;
    for (let across = 1; across <= nodes; across++) {
      const down = Math.ceil(nodes / across);
      const room = Math.min((width / across - 2) / wide, (height / down - 2) / high);
      const cell = Math.min(Math.floor(room), LARGEST_CELL * scale);
      if (cell > best.cell) best = { cell, wide, high, across };
    }
  }
  const { wide, high, across } = best;
  const down = Math.ceil(nodes / across);
  const cell = Math.max(1, best.cell);
  const made = blank(down * high, across * wide, cell, cell, wide, high, width, height, world);
  for (let rank = 0; rank < world; rank++) {
    const [node, place] = [Math.floor(rank / nodeSize), rank % nodeSize];
    const row = Math.floor(node / across) * high + Math.floor(place / wide);
    put(made, rank, row, (node % across) * wide + (place % wide));
  }
  for (let i = 0; i < down; i++) made.bands.push({ row: i * high, text: names[i * across] ?? `node ${i * across}` });
  made.across = `${plural(across, "node")} in a row, ${plural(nodeSize, "rank")} each`;
  return made;
}

/**
 * @param {import("./grid.js").Layout} layout @param {number} width @param {number} height @param {number} [scale]
 * @returns {Arrangement}
 */
export function byGrid(layout, width, height, scale = 1) {
  const [dp, pp, inner] = [sizeOf(layout, "dp"), sizeOf(layout, "pp"), ["cp", "tp", "ep"].reduce((n, axis) => n * sizeOf(layout, axis), 1)];
  const ways = [];
  for (let lines = 1; lines <= Math.min(dp, 64); lines++) {
    ways.push({ rows: pp * inner * lines, columns: Math.ceil(dp / lines), lines, down: "pp" });
  }
  ways.push({ rows: dp * inner, columns: pp, lines: 1, down: "dp" });
  let best = { room: 0, way: ways[0] };
  for (const way of ways) {
    // A stage in several lines is harder to read: only where cells grow by it.
    const room = Math.min(width / way.columns, (1.5 * height) / way.rows, LARGEST_CELL * scale) / (way.lines > 1 ? 1.6 : 1);
    if (room > best.room) best = { room, way };
  }
  const { rows, columns, lines, down } = best.way;
  const band = inner * lines;
  const gap = 2 * Math.ceil(rows / band);
  const cellWidth = Math.max(1, Math.min(Math.floor(width / columns), LARGEST_CELL * scale));
  const cellHeight = Math.max(1, Math.min(Math.floor((height - gap) / rows), LARGEST_CELL * scale, 3 * cellWidth));
  const made = blank(rows, columns, Math.min(cellWidth, 3 * cellHeight), cellHeight, columns, band, width, height, dp * pp * inner);
  for (let d = 0; d < dp; d++) {
    for (let p = 0; p < pp; p++) {
      for (let i = 0; i < inner; i++) {
        const rank = rankAt(layout, { dp: d, pp: p }) + i;
        const line = Math.floor(d / columns);
        if (down === "pp") put(made, rank, (p * lines + line) * inner + i, d % columns);
        else put(made, rank, d * inner + i, p);
      }
    }
  }
  for (let i = 0; i < rows / band; i++) made.bands.push({ row: i * band, text: `${down} ${i}` });
  made.across = down === "pp" ? `dp 0 to ${dp - 1} across${lines > 1 ? ` in ${lines} lines` : ""}` : `pp 0 to ${pp - 1} across`;
  return made;
}

/** @returns {Arrangement} */
function blank(rows, columns, cellWidth, cellHeight, blockColumns, blockRows, width, height, world) {
  const fits = (cell, blocks, count, room) => Math.max(0, Math.min(gapOf(cell), blocks > 1 ? Math.floor((room - cell * count) / (blocks - 1)) : 0));
  const gapX = fits(cellWidth, columns / blockColumns, columns, width);
  const gapY = fits(cellHeight, rows / blockRows, rows, height);
  const xs = Int32Array.from({ length: columns }, (_, i) => i * cellWidth + Math.floor(i / blockColumns) * gapX);
  const ys = Int32Array.from({ length: rows }, (_, i) => i * cellHeight + Math.floor(i / blockRows) * gapY);
  return {
    rows,
    columns,
    ranks: new Int32Array(rows * columns).fill(-1),
    cells: new Int32Array(world).fill(-1),
    xs,
    ys,
    cellWidth,
    cellHeight,
    width: xs[columns - 1] + cellWidth,
    height: ys[rows - 1] + cellHeight,
    bands: [],
    bandRows: blockRows,
    across: "",
  };
}

/** @param {Arrangement} made */
function put(made, rank, row, column) {
  made.ranks[row * made.columns + column] = rank;
  made.cells[rank] = row * made.columns + column;
}

/** The rank whose cell has this pixel, or -1. @param {Arrangement} made */
export function rankUnder(made, x, y) {
  const column = lastNotAbove(made.xs, x);
  const row = lastNotAbove(made.ys, y);
  if (column < 0 || row < 0 || x >= made.xs[column] + made.cellWidth || y >= made.ys[row] + made.cellHeight) return -1;
  return made.ranks[row * made.columns + column];
}

/** Where an arrow key leads from a rank: over cells that have none, to the edge at most. @param {Arrangement} made */
export function neighbour(made, rank, right, down) {
  const cell = made.cells[rank];
  let [row, column] = [Math.floor(cell / made.columns) + down, (cell % made.columns) + right];
  for (; row >= 0 && row < made.rows && column >= 0 && column < made.columns; row += Math.sign(down), column += Math.sign(right)) {
    const found = made.ranks[row * made.columns + column];
    if (found >= 0) return found;
    if (!right && !down) break;
  }
  return rank;
}
