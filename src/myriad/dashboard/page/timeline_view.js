/** Timeline of selected ranks and steps: measured spans, predicted spans, and which rank waited for which. */

import { askTile } from "./api.js";
import { INSIDE_EVALUATION, RING_SPANS, SPAN_LEGEND, spanColour } from "./colours.js";
import { countRanges, placeOf, rangesText, withWaiters } from "./grid.js";
import { count, plural, seconds } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { arrangeLanes, waitersOf } from "./lanes.js";
import { useAnswer } from "./query.js";
import { amend, go, hrefOf } from "./route.js";
import { useSize } from "./theme.js";
import { TimelineCanvas } from "./timeline_canvas.js";
import { AXIS } from "./timeline_paint.js";
import { Field, Problem, Tick } from "./widgets.js";

const LANE_PIXELS = 3;
const MOST_LANES = 4096;
const SETTLE_MS = 120;
const ARROWS_MS = 600;
const WAITERS_NAMED = 12;

/** @param {{run: any, query: Record<string, string>, version: number, theme: import("./colours.js").Theme}} props */
export function TimelineView({ run, query, version, theme }) {
  const area = useRef(null);
  const size = useSize(area);
  const ranks = query.ranks || `0-${run.world - 1}`;
  const chosen = countRanges(ranks, run.world);
  const steps = query.start === undefined ? query.steps || `${Math.max(run.first_step, run.last_step - 1)}-${run.last_step}` : "";
  const selected = Number.isInteger(Number(query.rank ?? NaN)) && Number(query.rank) < run.world ? Number(query.rank) : -1;

  const zoom = Math.max(1, Number(query.zoom) || 1);
  const lanes = Math.min(chosen, MOST_LANES, Math.floor(((size.height - AXIS) / LANE_PIXELS) * zoom));
  const window_ = steps ? { steps } : wider(query);
  const asked = { ranks, ...window_, lanes, width: size.width * (steps ? 1 : 2) };
  // Finished steps no longer change, so they are requested once.
  const fixed = query.steps || query.start ? 0 : version;
  const [again, setAgain] = useState(0);
  const key = size.height && chosen ? JSON.stringify(asked) : "";
  const answer = useAnswer(key, () => askTile("/api/timeline", asked), `${fixed}.${again}`);
  useArrowsToCome(answer.value, setAgain);
  const data = useMemo(() => answer.value && arrangeLanes(answer.value), [answer.value]);
  const viewport = useViewport(query, steps, data, answer.key);
  const onViewport = useSettled((at) => amend({ start: text(at.start), end: text(at.end), steps: undefined, zoom: at.zoom > 1 ? at.zoom.toFixed(2) : undefined }));

  return html`
    <section class="timeline" aria-label="Timeline">
      <div class="bar">
        <${Field} label="Ranks" value=${ranks} size=${24} hint="0-63,70" onChange=${(value) => amend({ ranks: value, rank: undefined })} />
        <${Field} label="Steps" value=${steps} size=${9} hint="10-12" onChange=${(value) => amend({ steps: value, start: undefined, end: undefined })} />
        <${Tick} label="Arrows" checked=${query.arrows !== "off"} onChange=${(on) => amend({ arrows: on ? undefined : "off" })} />
        <button onClick=${() => amend({ ranks: undefined, rank: undefined })}>All ranks</button>
        ${query.start !== undefined && html`<button onClick=${() => amend({ start: undefined, end: undefined, zoom: undefined })}>Newest steps</button>`}
        <${Legend} names=${data?.drawn ?? []} />
      </div>
      <${Problem} error=${Number.isNaN(chosen) ? new Error(`Ranks: numbers from 0 to ${run.world - 1} and ranges, as in 0-63,70`) : answer.error} />
      <div class="area" ref=${area}>
        ${data && size.height > AXIS && html`<${TimelineCanvas} data=${data} viewport=${viewport} onViewport=${onViewport} size=${size} selected=${selected}
          onSelect=${(rank) => amend({ rank })} onOpen=${(rank) => go("parallel", { rank })}
          options=${{ theme, arrows: query.arrows !== "off", clockError: run.clock_error_seconds }}
          describe=${(lane, span) => describe(run, data, lane, span)} />`}
        ${!data && !answer.error && html`<p class="dim">Reading spans…</p>`}
      </div>
      <p class="below">${data && html`<${Selected} run=${run} data=${data} rank=${selected} chosen=${chosen} />`}</p>
    </section>`;
}

/** If the waits are not computed yet, the window is requested again later. */
function useArrowsToCome(tile, setAgain) {
  useEffect(() => {
    if (!tile?.facts.arrows_to_come) return;
    const timer = setTimeout(() => setAgain((before) => before + 1), ARROWS_MS);
    return () => clearTimeout(timer);
  }, [tile]);
}

/** Request a window that is twice as wide, so that panning has spans to show. */
function wider({ start, end }) {
  const [from, to] = [Number(start), Number(end)];
  const more = (to - from) / 2;
  return { start: text(from - more), end: text(to + more) };
}

/** Format seconds for the address. @param {number} value */
const text = (value) => value.toFixed(7).replace(/\.?0+$/, "");

/** The viewport: from the address, else all received spans. Panning changes it in place. */
function useViewport(query, steps, data, answered) {
  const kept = useRef({ viewport: { start: 0, end: 1, top: 0, zoom: 1 }, key: "", window: "" });
  const held = kept.current;
  const wanted = steps ? `${answered} ${data?.begin}` : `${query.start} ${query.end}`;
  if (wanted !== held.window) {
    held.window = wanted;
    const [start, end] = steps ? [data?.begin ?? 0, data?.end ?? 1] : [Number(query.start), Number(query.end)];
    const same = text(start) === text(held.viewport.start) && text(end) === text(held.viewport.end);
    if (!same) held.viewport = { start, end: Math.max(end, start + 1e-6), top: steps ? 0 : held.viewport.top, zoom: Math.max(1, Number(query.zoom) || 1) };
  }
  return held.viewport;
}

/** Debounce: call with the newest value after a short delay. @template T @param {(value: T) => void} call @returns {(value: T) => void} */
function useSettled(call) {
  const state = useRef({ timer: 0, value: undefined, call });
  state.current.call = call;
  return (value) => {
    const now = state.current;
    now.value = value;
    now.timer ||= setTimeout(() => {
      now.timer = 0;
      now.call(now.value);
    }, SETTLE_MS);
  };
}

/** @returns {string[]} */
function describe(run, data, lane, span) {
  const where = `rank ${lane.rank} · ${run.nodes?.[Math.floor(lane.rank / run.node_size)] ?? ""} · ${placeOf(run.layout, lane.rank)}`;
  const group = lane.worstOf > 1 ? [`the slowest of ${plural(lane.worstOf, "rank")} in this lane`] : [];
  if (span < 0) return [where, ...group];
  const chunk = RING_SPANS.includes(data.names[data.name[span]]) ? "ring step" : "chunk";
  const part = [["micro-batch", data.microBatch], ["stage", data.stage], [chunk, data.chunk]].filter(([, of]) => of[span] >= 0).map(([what, of]) => `${what} ${of[span]}`);
  const name = `${data.names[data.name[span]]}${lane.predicted ? ", predicted" : ""}: ${seconds(data.stop[span] - data.start[span])}`;
  return [name, ...(part.length ? [part.join(", ")] : []), where, ...group, `from ${data.start[span].toFixed(6)} s`];
}

function Selected({ run, data, rank, chosen }) {
  const measured = data.lanes.filter((lane) => !lane.predicted);
  const grouped = measured.some((lane) => lane.worstOf > 1);
  const lanes = grouped ? `${plural(measured.length, "lane")} for ${plural(chosen, "rank")}: each is the worst of its group.` : `${plural(measured.length, "rank")}.`;
  if (rank < 0) return html`<span>${lanes} Drag to pan, wheel to zoom time, Shift and wheel to zoom lanes; click a lane to choose its rank.</span>`;
  const waiters = waitersOf(data, rank);
  const named = waiters.slice(0, WAITERS_NAMED);
  return html`
    <span><b>Rank ${rank}</b> on ${run.nodes?.[Math.floor(rank / run.node_size)]} · ${placeOf(run.layout, rank)} · <a href=${hrefOf("parallel", { rank })}>its groups</a>${" · "}
      <a href=${hrefOf("timeline", { rank, ranks: rangesText(withWaiters(run.layout, rank)), steps: `${run.last_step}` })}>with waiting ranks</a></span>
    <span class="waiters">${waiters.length ? html`Waiting for it: ${named.map(({ rank: other, times }) => html`
      <button class="link" key=${other} onClick=${() => amend({ rank: other })} title="${plural(times, "time")} in this window">${other}</button> `)}
      ${waiters.length > named.length && `and ${count(waiters.length - named.length)} more`}` : data.arrowsToCome ? "Computing the ranks that wait for it…" : "No rank waits for it in this window."}</span>`;
}

/** Legend of the spans in the window. @param {{names: string[]}} props */
function Legend({ names }) {
  const known = new Set(SPAN_LEGEND.flatMap(([, of]) => of.split(" ")));
  const entries = SPAN_LEGEND.filter(([, of]) => of.split(" ").some((name) => names.includes(name)));
  const added = names.filter((name) => !known.has(name) && !name.startsWith(INSIDE_EVALUATION)).slice(0, 4);
  const all = [...entries.map(([title, of]) => [title, spanColour(of.split(" ")[0])]), ...added.map((name) => [name, spanColour(name)])];
  return html`<div class="legend">${all.map(([title, colour]) => html`<span key=${title}><i class="swatch" style=${{ background: colour }}></i>${title}</span>`)}</div>`;
}
