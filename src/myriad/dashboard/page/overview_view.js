/** Overview of the run: key figures, curves, where its time was spent, and events. */

import { askJson } from "./api.js";
import { Chart } from "./chart.js";
import { classColour } from "./colours.js";
import { isBad, nameOf } from "./event_names.js";
import { Experts } from "./experts.js";
import { count, percent, plain, plural, seconds } from "./format.js";
import { html, useMemo, useState } from "./html.js";
import { LayerNorms } from "./norms.js";
import { useAnswer } from "./query.js";
import { Scores } from "./scores.js";
import { Figure, Problem, Time, Where } from "./widgets.js";

const CURVES = [
  ["Loss", "loss", plain],
  ["Tokens per second", "tokens_per_second", count],
  ["MFU", "mfu", percent],
  ["Step time", "step_seconds", seconds],
  ["Largest attention logit", "max_attention_logit", plain],
  ["Load of the busiest expert", "expert_load", plain],
  ["Entropy of routers", "router_entropy", plain],
  ["Gradient noise scale (tokens)", "noise_scale", count],
];
/** Curves that are shown only if the run has them. */
const OPTIONAL = new Set(["noise_scale", "max_attention_logit", "expert_load", "router_entropy"]);
/** Events that are marked on the curves, because they often explain a change. */
const MARKED = new Set(["fault", "diagnosis", "eviction", "restart", "resume", "start", "spike", "skip", "bad_block", "health", "job_changed", "phase", "start_over", "held"]);
const NEWEST_EVENTS = 200;
/** Losses whose colours are those of a class of time. */
const LOSS_CLASSES = { "slower than peak": "compute", "slower ranks": "slow", tensor: "tp", experts: "ep", pipeline: "pp", "data parallel": "dp" };

/** @param {{run: any, version: number, theme: import("./colours.js").Theme}} props */
export function OverviewView({ run, version, theme }) {
  const overview = useAnswer("overview", () => askJson("/api/overview", { points: 2000 }), version);
  const waterfall = useAnswer("waterfall", () => askJson("/api/waterfall"), version);
  const it = overview.value;
  const shared = useShared(it?.step.length ?? 0);
  const marks = useMemo(() => (it ? marksOf(it) : []), [it]);
  return html`
    <section class="overview scroll" tabindex="0" aria-label="Overview">
      <${Problem} error=${overview.error} />
      <div class="figures">
        <${Figure} name="Step" value=${count(it?.step.at(-1))} />
        <${Figure} name="Loss" ...${lossNow(it)} />
        <${Figure} name="Tokens/s" value=${count(it?.speed?.tokens_per_second && Math.round(it.speed.tokens_per_second))} note=${meanOf(it?.speed)} />
        <${Figure} name="MFU" value=${percent(it?.speed?.mfu)} note=${run.peak_flops ? `of ${count(run.peak_flops)}FLOP/s, ${run.peak_source}` : run.peak_source} />
        <${Figure} name="ETTR" value=${percent(it?.ettr)} note="effective training time" />
        <${Figure} name="Goodput" value=${`${count(it?.goodput)} tokens/s`} note="since the start, all stops counted" />
        <${LostData} dropped=${run.dropped ?? {}} />
      </div>
      ${run.problems?.length > 0 && html`<details class="doubts"><summary>${plural(run.problems.length, "file or batch", "files or batches")} could not be read</summary>
        <ul>${run.problems.toReversed().map((text, i) => html`<li key=${i}>${text}</li>`)}</ul></details>`}
      <div class="charts">${it?.step.length > 0 && CURVES.filter(([, name]) => !OPTIONAL.has(name) || it[name]?.some((value) => value !== null)).map(([title, name, show]) => html`
        <${Chart} key=${name} title=${title} at=${it.step} values=${it[name]} show=${show} marks=${marks} theme=${theme} ...${shared} />`)}</div>
      ${it?.expert_loads && html`<${Experts} found=${it.expert_loads} />`}
      ${it?.norms_step && html`<${LayerNorms} newest=${it.norms_step} />`}
      ${it?.scores.length > 0 && html`<${Scores} scores=${it.scores} total=${it.num_scores} />`}
      <div class="columns">
        <div class="card wide">
          <h2>Where the time went</h2>
          ${it && html`<${Ledger} ledger=${it.ledger} />`}
          <${Waterfall} answer=${waterfall} />
        </div>
        <div class="card wide"><h2>Events</h2>${it && html`<${Events} events=${it.events} total=${it.num_events} world=${run.world} />`}</div>
      </div>
    </section>`;
}

/** The newest loss; if it is non-finite, the step since when. */
function lossNow(it) {
  if (!it?.step.length) return { value: "–" };
  const i = it.loss.findLastIndex((value) => value !== null);
  if (i === it.loss.length - 1 || i < 0) return { value: plain(it.loss.at(-1)) };
  return { value: "NaN", note: `non-finite since step ${count(it.step[i + 1])}; ${plain(it.loss[i])} at step ${count(it.step[i])}` };
}

const meanOf = (speed) => (speed ? `mean of steps ${count(speed.first_step)} to ${count(speed.last_step)}` : "");

/** Counters that the server reports beside the losses, but that count no loss. */
const SHOWN = ["spans_kept", "batches_sent_again"];

/** How many spans, batches and files were lost on the way to this page, if any. @param {{dropped: Record<string, number>}} props */
function LostData({ dropped }) {
  const kinds = Object.entries(dropped).filter(([name, number]) => number > 0 && !SHOWN.includes(name));
  const texts = kinds.map(([name, number]) => `${count(number)} ${name.replaceAll("_", " ")}`);
  return texts.length > 0 && html`<${Figure} name="Lost data" value=${texts[0]} note=${texts.slice(1).join(", ")} />`;
}

/** Cursor and range of steps that all charts share; all steps unless a range was selected. @param {number} length */
function useShared(length) {
  const [cursor, onCursor] = useState(-1);
  const [chosen, onStretch] = useState(null);
  const stretch = useMemo(() => (chosen && chosen.to < length ? chosen : { from: 0, to: Math.max(0, length - 1) }), [chosen, length]);
  return { cursor, onCursor, stretch, onStretch };
}

/** Events on the axis of steps: at their step, or else at the first step that ended after each. */
function marksOf({ step, time, events }) {
  if (!step.length) return [];
  return events.filter((event) => MARKED.has(event.event)).map((event) => {
    const text = `${nameOf(event)}: ${event.text}`;
    const label = event.event === "phase" ? event.text.split(":")[0] : "";
    if (event.step > 0) return { at: Math.min(event.step, step.at(-1)), text, label };
    const i = event.time === null ? -1 : time.findIndex((at) => at >= event.time);
    return { at: step[i < 0 ? step.length - 1 : i], text };
  });
}

/** @param {{ledger: Record<string, number>}} props */
function Ledger({ ledger }) {
  const lines = Object.entries(ledger).filter(([, spent]) => spent > 0);
  const total = lines.reduce((sum, [, spent]) => sum + spent, 0) || 1;
  return html`
    <div class="stack" role="img" aria-label=${lines.map(([name, spent]) => `${name} ${percent(spent / total)}`).join(", ")}>
      ${lines.map(([name, spent], i) => html`<i key=${name} title="${name}: ${seconds(spent)}" style=${{ flexGrow: spent / total, background: classColour(name, i) }}></i>`)}</div>
    <p class="key">${lines.map(([name, spent], i) => html`
      <span key=${name}><i class="swatch" style=${{ background: classColour(name, i) }}></i>${name} <b>${percent(spent / total)}</b> <span class="dim">${seconds(spent)}</span></span>`)}</p>`;
}

/** Waterfall from the peak to the measured MFU, with the predicted losses beside the measured ones. */
function Waterfall({ answer }) {
  const lines = waterfallLines(answer.value);
  if (!lines.length) return null;
  const predicted = lines.some((line) => line.predicted !== undefined);
  const ends = lines.map((line) => [line.from, line.from + (line.measured || 0)]);
  const share = (value) => `${(100 * value) / Math.max(1, ...ends.flat())}%`;
  return html`
    <h2>From the peak to the MFU</h2>
    <table class="waterfall"><thead><tr><th>Lost to</th><th class="n">Measured</th>${predicted && html`<th class="n">Predicted</th>`}<th><span class="unseen">Share</span></th></tr></thead>
      <tbody>${lines.map((line, i) => html`
        <tr key=${line.name} class=${line.total ? "total" : ""}><td>${line.name}</td><td class="n">${percent(line.measured)}</td>
          ${predicted && html`<td class="n dim">${percent(line.predicted)}</td>`}
          <td class="fall"><i style=${{ marginLeft: share(Math.max(0, Math.min(...ends[i]))), width: share(Math.min(1, Math.abs(line.measured || 0))),
            background: line.total ? "var(--dim)" : classColour(LOSS_CLASSES[line.name] ?? line.name, i) }}></i></td></tr>`)}</tbody></table>
`;
}

/** @returns {{name: string, measured: number, predicted?: number, from: number, total?: boolean}[]} */
function waterfallLines(value) {
  if (!value?.measured) return [];
  const { measured, predicted } = value;
  const planned = new Map(predicted?.losses.map((loss) => [loss.name, loss.lost]));
  const seen = measured.losses.filter((loss) => Math.abs(loss.lost) >= 5e-5 || planned.get(loss.name) >= 5e-5);
  const lines = seen.map(({ name, lost, left }) => ({ name, measured: lost, predicted: planned.get(name), from: left }));
  const mfu = { name: "MFU", measured: measured.mfu, predicted: predicted?.mfu, from: 0, total: true };
  return measured.mfu ? [...lines, mfu] : lines;
}

/** @param {{events: {place: number, time: number, event: string, text: string}[], total: number, world: number}} props */
export function Events({ events, total, world }) {
  const newest = events.slice(-NEWEST_EVENTS).reverse();
  return html`<ol class="events" tabindex="0" aria-label="Events, newest first">${newest.map((event) => html`
    <li key=${event.place} class=${isBad(event) ? "bad" : ""}><${Time} at=${event.time} /><b>${nameOf(event)}</b>
      <span>${event.text}${event.times > 1 && html` <b class="times">${count(event.times)} times in ${seconds(event.seconds)}</b>`} <${Where} event=${event} world=${world} /></span></li>`)}
    ${!events.length && html`<li class="dim">No events yet.</li>`}
    ${total > newest.length && html`<li class="dim"><span></span><span></span><span>${count(total - newest.length)} older events are in events.jsonl.</span></li>`}</ol>`;
}
