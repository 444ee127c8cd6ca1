/**
 * The rank grid, as `myriad.comm.grid` numbers it: one array with the axes below, the last one fastest.
 *
 * @typedef {{dp: number, pp: number, tp: number, cp?: number, ep?: number, virtual_stages?: number}} Layout
 * @typedef {Record<string, number>} Coordinates
 */

/** Axes, slowest first. */
export const AXES = ["dp", "pp", "cp", "tp", "ep"];

/** @param {Layout} layout @param {string} axis */
export const sizeOf = (layout, axis) => layout[axis] || 1;

/** @param {Layout} layout @param {number} rank @returns {Coordinates} */
export function coordinatesOf(layout, rank) {
  /** @type {Coordinates} */
  const found = {};
  for (let i = AXES.length - 1, rest = rank; i >= 0; i--) {
    const size = sizeOf(layout, AXES[i]);
    found[AXES[i]] = rest % size;
    rest = Math.floor(rest / size);
  }
  return found;
}

/** @param {Layout} layout @param {Coordinates} at */
export const rankAt = (layout, at) => AXES.reduce((rank, axis) => rank * sizeOf(layout, axis) + (at[axis] || 0), 0);

/** Ranks that differ from this one along the axis only, itself included. @param {Layout} layout */
export function peersAlong(layout, rank, axis) {
  const at = coordinatesOf(layout, rank);
  return Array.from({ length: sizeOf(layout, axis) }, (_, i) => rankAt(layout, { ...at, [axis]: i }));
}

/** "pp 3 · dp 17 · tp 4": the axes that have more than one rank. @param {Layout} layout */
export function placeOf(layout, rank) {
  const at = coordinatesOf(layout, rank);
  return placeText(at, (axis) => sizeOf(layout, axis) > 1) || "the only one";
}

/** @param {Coordinates} at @param {(axis: string) => boolean} shown */
export const placeText = (at, shown = () => true) =>
  ["pp", "dp", "cp", "tp", "ep"].filter((axis) => axis in at && shown(axis)).map((axis) => `${axis} ${at[axis]}`).join(" · ");

/**
 * A rank with those who may wait for it: its tensor and pipeline groups, and the nearest of its data group.
 * @param {Layout} layout
 */
export function withWaiters(layout, rank, mostOfData = 8) {
  const data = peersAlong(layout, rank, "dp");
  const from = Math.max(0, Math.min(data.indexOf(rank) - mostOfData / 2, data.length - mostOfData));
  const all = [...peersAlong(layout, rank, "tp"), ...peersAlong(layout, rank, "pp"), ...data.slice(from, from + mostOfData)];
  return [...new Set([rank, ...all])].sort((a, b) => a - b);
}

/** [0, 1, 2, 7] as "0-2,7". @param {number[]} ranks ascending */
export function rangesText(ranks) {
  const parts = [];
  for (let i = 0; i < ranks.length; ) {
    let j = i;
    while (j + 1 < ranks.length && ranks[j + 1] === ranks[j] + 1) j++;
    parts.push(j > i ? `${ranks[i]}-${ranks[j]}` : `${ranks[i]}`);
    i = j + 1;
  }
  return parts.join(",");
}

/** How many ranks "0-2,7" names below `world`; NaN: it cannot be read. @param {string} text */
export function countRanges(text, world) {
  let count = 0;
  for (const part of text.split(",")) {
    const match = /^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/.exec(part);
    if (!match) return NaN;
    const from = Number(match[1]);
    const to = Math.min(Number(match[2] ?? from), world - 1);
    if (from >= world || to < from) return NaN;
    count += to - from + 1;
  }
  return count;
}
