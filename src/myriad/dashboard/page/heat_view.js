/** Heat map of all ranks, with the selected steps and a table of the ranks that deviate most from their peers. */

import { askJson, askTile } from "./api.js";
import { byGrid, byNode } from "./arrange.js";
import { domainOf, stopsOf, unknownOf } from "./colours.js";
import { placeOf, placeText, rangesText, sizeOf, withWaiters } from "./grid.js";
import { count, deviation, plural, score, seconds } from "./format.js";
import { html, useMemo, useRef, useState } from "./html.js";
import { HeatMap } from "./heat_map.js";
import { useAnswer } from "./query.js";
import { amend, go, hrefOf } from "./route.js";
import { Scrubber } from "./scrubber.js";
import { useSize } from "./theme.js";
import { Choice, Problem } from "./widgets.js";

const STEPS_SHOWN = 10;
const GUTTER = 64;
/**
 * How far a rank is from its peers: as a score in units of their spread; in percent where it has fewer than four
 * peers, as so few have no spread. Below ``usual`` a value is drawn dim; ``limits`` are those of the colours;
 * ``full`` is the top of the strip.
 */
const MEASURES = {
  z: { key: "z", ofStep: "worst_z", name: "Score", label: "score among peers", show: score, usual: 3, limits: [6, 30], full: 12,
    hint: "Robust score among ranks of the same stage: 0 is their median" },
  deviation: { key: "deviation", ofStep: "worst_deviation", name: "Against peers", label: "difference from peers", show: deviation, usual: 0.25,
    limits: [0.5, 4], full: 1, hint: "Time beyond that of the other ranks of the stage, as a share of theirs" },
};

/** @param {{run: any, query: Record<string, string>, version: number, theme: import("./colours.js").Theme}} props */
export function HeatView({ run, query, version, theme }) {
  const { phase, first, last, following } = windowOf(run, query);
  const scale = query.scale === "ms" ? "ms" : "z";
  const measure = run.few_peers ? MEASURES.deviation : MEASURES.z;
  const asked = { phase, first, last };
  const key = `${phase} ${first} ${last}`;
  const heat = useAnswer(key, () => askTile("/api/heat", asked), version);
  const steps = useAnswer(phase, () => askTile("/api/steps", { phase }), version);
  const worst = useAnswer(key, () => askJson("/api/worst", { ...asked, limit: 50 }), version);

  const area = useRef(null);
  const size = useSize(area);
  const pixels = devicePixelRatio || 1;
  const arrangement = useMemo(() => {
    if (!size.width || !size.height) return null;
    const [width, height] = [(size.width - GUTTER) * pixels, size.height * pixels];
    if (query.by === "grid") return byGrid(run.layout, width, height, pixels);
    return byNode(run.world, run.node_size, width, height, run.nodes ?? [], pixels);
  }, [size.width, size.height, query.by, run.world, run.node_size, JSON.stringify(run.layout), pixels]);

  const tile = heat.value;
  const values = tile && (scale === "ms" ? tile.arrays.seconds : tile.arrays[measure.key]);
  const domain = useMemo(() => (values ? domainOf(values, scale, measure.limits) : [0, 1]), [values, scale]);
  const selected = Number.isInteger(Number(query.rank ?? NaN)) && Number(query.rank) < run.world ? Number(query.rank) : -1;
  const timelineOf = (rank) => timelineQuery(run, rank, worstStep(steps.value, measure, first, last));
  const setWindow = (a, b) => amend({ first: a, last: b >= run.last_step && following ? undefined : b });

  return html`
    <section class="heat" aria-label="Heat map">
      <div class="bar">
        <${Choice} label="Phase" value=${phase} options=${run.phases} onChange=${(value) => amend({ phase: value })} />
        <${Choice} label="Arranged by" value=${query.by === "grid" ? "grid" : "node"} onChange=${(by) => amend({ by })}
          options=${[["node", "node"], ["grid", "pp × dp × tp"]]} />
        <${Choice} label="Colour" value=${scale} onChange=${(value) => amend({ scale: value })}
          options=${[["z", measure.label], ["ms", "time"]]} />
        <${Legend} scale=${scale} measure=${measure} domain=${domain} theme=${theme} missing=${tile?.facts.missing} />
      </div>
      <${Problem} error=${heat.error ?? worst.error} />
      <div class="split">
        <div class="left">
          <div class="area" ref=${area}>
            ${arrangement && values && html`<${HeatMap} arrangement=${arrangement} values=${values} domain=${domain} scale=${scale}
              theme=${theme} pixels=${pixels} selected=${selected} onSelect=${(rank) => amend({ rank })}
              onOpen=${(rank) => go("timeline", timelineOf(rank))} describe=${(rank) => describe(run, tile, measure, phase, rank)} />`}
            ${!values && !heat.error && html`<p class="dim">Reading spans…</p>`}
          </div>
          <div class="strip">
            <${Scrubber} steps=${steps.value?.arrays} measure=${measure} from=${run.first_step} to=${run.last_step} first=${first} last=${last}
              onChange=${setWindow} theme=${theme} />
            <p class="dim">Mean of steps <b>${count(first)}</b> to <b>${count(last)}</b>${following ? ", following the run" : ""}
              ${!following && html` · <button class="link" onClick=${() => amend({ first: undefined, last: undefined })}>follow the run</button>`}
              ${arrangement && html` · ${arrangement.across}`}</p>
          </div>
        </div>
        <${WorstTable} rows=${worst.value} measure=${measure} run=${run} phase=${phase} selected=${selected} timelineOf=${timelineOf} />
      </div>
    </section>`;
}

/** Steps and phase to show: the newest steps unless others were selected. */
function windowOf(run, query) {
  const phase = run.phases.includes(query.phase) ? query.phase : run.phases.includes("forward") ? "forward" : run.phases[0];
  const following = query.last === undefined;
  const bound = (value) => Math.max(run.first_step, Math.min(run.last_step, value));
  const last = following ? run.last_step : bound(Number(query.last) || 0);
  const first = query.first === undefined ? bound(last - STEPS_SHOWN + 1) : Math.min(last, bound(Number(query.first) || 0));
  return { phase, first, last, following };
}

/** Return the step of the window in which the worst rank deviated most. */
function worstStep(tile, measure, first, last) {
  let [found, most] = [last, -Infinity];
  if (!tile) return found;
  const { step, [measure.ofStep]: worst } = tile.arrays;
  for (let i = 0; i < step.length; i++) {
    if (step[i] >= first && step[i] <= last && worst[i] > most) [found, most] = [step[i], worst[i]];
  }
  return found;
}

/** Address of the timeline of a rank and the ranks that wait for it. */
const timelineQuery = (run, rank, step) => ({ rank, ranks: rangesText(withWaiters(run.layout, rank)), steps: `${step}` });

/** @returns {string[]} */
function describe(run, tile, measure, phase, rank) {
  if (rank < 0 || !tile) return [];
  const { seconds: spent, [measure.key]: away } = tile.arrays;
  const node = Math.floor(rank / run.node_size);
  const value = Number.isNaN(spent[rank]) ? `no ${phase} in these steps` : `${phase} ${seconds(spent[rank])} a step, ${measure.key === "z" ? "score " : ""}${measure.show(away[rank])}${measure.key === "z" ? "" : " against its peers"}`;
  return [`rank ${rank} on ${run.nodes?.[node] ?? `node ${node}`}`, placeOf(run.layout, rank), value];
}

function Legend({ scale, measure, domain, theme, missing }) {
  const show = scale === "z" ? measure.show : seconds;
  const gradient = { background: `linear-gradient(to right, ${stopsOf(scale, theme).join(", ")})` };
  return html`
    <div class="legend" title=${scale === "z" ? measure.hint : "Mean time of the phase in a step"}>
      <span>${show(domain[0])}${scale === "z" ? " faster" : ""}</span><i class="ramp" style=${gradient}></i>
      <span>${show(domain[1])}${scale === "z" ? " slower" : ""}</span>
      ${missing > 0 && html`<span><i class="swatch" style=${{ background: unknownOf(scale, theme) }}></i>${plural(missing, "rank")} without spans</span>`}
    </div>`;
}

const COLUMNS = [
  ["rank", "Rank"],
  ["node", "Node"],
  ["z", ""],
  ["seconds", "Time"],
  ["peers_seconds", "Peers"],
];

function WorstTable({ rows, measure, run, phase, selected, timelineOf }) {
  const [order, setOrder] = useState({ by: "z", down: true });
  const keyOf = (by) => (by === "z" ? measure.key : by);
  const sorted = useMemo(() => {
    const sign = order.down ? -1 : 1;
    const compared = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b), "en", { numeric: true }) : a - b);
    return [...(rows ?? [])].sort((a, b) => sign * compared(a[keyOf(order.by)], b[keyOf(order.by)]));
  }, [rows, order]);
  const described = rows?.find((row) => row.rank === selected) ?? sorted[0];
  const sorting = (by) => setOrder({ by, down: order.by === by ? !order.down : by !== "rank" && by !== "node" });
  return html`
    <div class="beside">
      <h2>Largest deviations</h2>
      <p class="said">${described?.sentence ?? (rows ? `No rank deviates in ${phase}.` : "…")}</p>
      <div class="scroll" tabindex="0" role="region" aria-label="Ranks with the largest deviations">
        <table>
          <thead><tr>${COLUMNS.map(([by, text]) => html`
            <th key=${by} class=${by === "node" ? "" : "n"} aria-sort=${order.by === by ? (order.down ? "descending" : "ascending") : "none"}>
              <button onClick=${() => sorting(by)}>${text || measure.name}${order.by === by ? (order.down ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
          <tbody>${sorted.map((row) => html`
            <tr key=${row.rank} class="${row.rank === selected ? "selected" : ""} ${Math.abs(row[measure.key]) < measure.usual ? "usual" : ""}" onMouseEnter=${() => amend({ rank: row.rank })}
              title=${placeText(row.coordinates ?? {}, (axis) => sizeOf(run.layout, axis) > 1)}>
              <td class="n"><a href=${hrefOf("timeline", timelineOf(row.rank))} onFocus=${() => amend({ rank: row.rank })}>${row.rank}</a></td>
              <td>${row.node}</td><td class="n">${measure.show(row[measure.key])}</td>
              <td class="n">${seconds(row.seconds)}</td><td class="n dim">${seconds(row.peers_seconds)}</td>
            </tr>`)}</tbody>
        </table>
      </div>
    </div>`;
}
