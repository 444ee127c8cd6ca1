/** Loads of experts: a cell for each expert of each block, in the newest step of which the run stored them. */

import { count, plain } from "./format.js";
import { html, useMemo } from "./html.js";

/** Load, over the mean, from which a cell has the full colour; and the opacity of an expert without tokens. */
const [MOST, NONE] = [2.5, 0.04];
/** Pixels: width of the map, least side of a cell, largest height of a row, height of the map. */
const [WIDTH, LEAST, TALLEST, TALL] = [900, 2, 14, 420];

/**
 * @typedef {{step: number, blocks: string[], loads: (number | null)[][]}} Loads
 * @param {{found: Loads}} props
 */
export function Experts({ found }) {
  const drawn = useMemo(() => html`<${Map} ...${found} />`, [found.step, found.blocks.length]);
  const { block, expert, load } = busiest(found);
  return html`
    <div class="card experts">
      <h2>Load of each expert, step ${count(found.step)}</h2>
      <p class="dim">Tokens over those of the mean expert of the block. Busiest: ${block}, expert ${expert}, ${plain(load)}.</p>
      ${drawn}
    </div>`;
}

/** @param {Loads} found */
function busiest({ blocks, loads }) {
  let most = { block: "–", expert: 0, load: 0 };
  loads.forEach((own, i) => own.forEach((load, expert) => {
    if (load > most.load) most = { block: blocks[i], expert, load };
  }));
  return most;
}

/** Blocks from above, experts from the left. @param {Loads} found */
function Map({ blocks, loads }) {
  const experts = Math.max(...loads.map((own) => own.length));
  const wide = Math.max(LEAST, Math.min(28, WIDTH / experts));
  const tall = Math.max(LEAST, Math.min(TALLEST, TALL / blocks.length));
  return html`
    <svg class="loads" width=${wide * experts} height=${tall * blocks.length} role="img" aria-label="Heat map: ${count(blocks.length)} blocks from above, ${count(experts)} experts from the left">
      ${loads.map((own, i) => own.map((load, expert) => html`
        <rect key="${i} ${expert}" x=${wide * expert} y=${tall * i} width=${wide - 1} height=${tall - 1}
          opacity=${Math.max(NONE, Math.min(1, (load ?? 0) / MOST))}><title>${blocks[i]}, expert ${expert}: ${plain(load)}</title></rect>`))}
    </svg>`;
}
