/** Overview of the run: key figures, curves, where its time was spent, and events. */

import { askJson } from "./api.js";
import { axesOf, axisOf } from "./chart_axes.js";
import { classColour } from "./colours.js";
import { ChartGrid, curvesOf, lineOf, pointsOf, smoothingOf } from "./curve_charts.js";
import { isBad, nameOf } from "./event_names.js";
import { Experts } from "./experts.js";
import { count, percent, plain, plural, seconds } from "./format.js";
import { html, useMemo } from "./html.js";
import { LayerNorms } from "./norms.js";
import { useAnswer } from "./query.js";
import { Scores } from "./scores.js";
import { lastNotAbove } from "./sorted.js";
import { Figure, Problem, Time, Where } from "./widgets.js";

const MOST_SCORES = 24;
const NEWEST_EVENTS = 200;
/** Losses whose colours are those of a class of time. */
const LOSS_CLASSES = { "slower than peak": "compute", "slower ranks": "slow", tensor: "tp", experts: "ep", context: "cp", pipeline: "pp", "data parallel": "dp" };

/** @param {{run: any, query: Record<string, string>, version: number, theme: import("./colours.js").Theme}} props */
export function OverviewView({ run, query, version, theme }) {
  const asked = query.first && query.last ? { first: query.first, last: query.last } : {};
  const overview = useAnswer(`overview ${asked.first ?? ""} ${asked.last ?? ""}`, () => askJson("/api/overview", { points: 2000, ...asked }), version);
  const waterfall = useAnswer("waterfall", () => askJson("/api/waterfall"), version);
  const it = overview.value;
  return html`
    <section class="overview scroll" tabindex="0" aria-label="Overview">
      <${Problem} error=${overview.error} />
      <div class="figures">
        <${Figure} name="Step" value=${count(it?.last_step)} />
        <${Figure} name="Loss" ...${it?.newest_loss ? lossNow(it.newest_loss) : { value: "–" }} />
        <${Figure} name="Tokens/s" value=${count(it?.speed?.tokens_per_second && Math.round(it.speed.tokens_per_second))} note=${meanOf(it?.speed)} />
        <${Figure} name="MFU" value=${percent(it?.speed?.mfu)} note=${run.peak_flops ? `of ${count(run.peak_flops)}FLOP/s, ${run.peak_source}` : run.peak_source} />
        <${Figure} name="ETTR" value=${percent(it?.ettr)} note="effective training time" />
        <${Figure} name="Goodput" value=${`${count(it?.goodput && Math.round(it.goodput))} tokens/s`} note="since the start, all stops counted" />
        <${LostData} dropped=${run.dropped ?? {}} />
      </div>
      ${run.problems?.length > 0 && html`<details class="doubts"><summary>${plural(run.problems.length, "file or batch", "files or batches")} could not be read</summary>
        <ul>${run.problems.toReversed().map((text, i) => html`<li key=${i}>${text}</li>`)}</ul></details>`}
      ${it?.step.length > 0 && html`<${Charts} it=${it} query=${query} theme=${theme} />`}
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

/** All charts of the run. @param {{it: any, query: Record<string, string>, theme: import("./colours.js").Theme}} props */
function Charts({ it, query, theme }) {
  const axes = axesOf(it);
  const name = axes.includes(query.x) ? query.x : "steps";
  const axis = useMemo(() => axisOf(it, name, it.began), [it, name]);
  const smoothing = smoothingOf(query);
  const charts = useMemo(() => chartsOf(it, axis, smoothing), [it, axis, smoothing]);
  const marks = useMemo(() => marksOf(it, axis), [it, axis]);
  const shown = html`Steps <b>${count(it.step[0])}</b> to <b>${count(it.step.at(-1))}</b>`;
  return html`<${ChartGrid} ...${{ charts, axes, axis, marks, query, shown, whole: "All steps", theme }} />`;
}

/** The charts of a run: those that it has figures for, then scores. */
function chartsOf(it, axis, smoothing) {
  const charts = curvesOf([it]).map(([title, name, show]) => ({
    key: name,
    title,
    show,
    series: [lineOf(name === "loss" ? "training" : title, it[name], axis, smoothing), ...(name === "loss" ? validationsOf(it, axis) : [])],
  }));
  const scored = it.scores.filter((score) => score.step.length > 1).slice(0, MOST_SCORES);
  return [...charts, ...scored.map((score) => ({ key: `score ${score.name}`, title: score.name, show: plain, series: [pointsOf(score, axis)] }))];
}

const validationsOf = (it, axis) => it.validation.map((one) => pointsOf(one, axis)).filter((one) => one.x.length);

/** The newest loss; if it is non-finite, the step since when. */
function lossNow({ loss, step, since }) {
  return since === null ? { value: plain(loss) } : { value: "NaN", note: loss === null ? "" : `non-finite since step ${count(since)}; ${plain(loss)} at step ${count(step)}` };
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

/** Events on the axis, as far as it reaches; those after the last step are at its end. */
function marksOf({ step, marks, last_step: last }, axis) {
  const placed = marks.map((event) => ({ event, step: event.at > step.at(-1) && step.at(-1) >= last ? step.at(-1) : event.at }));
  const found = placed.filter((mark) => mark.step >= step[0] && mark.step <= step.at(-1));
  return found.map(({ event, step: own }) => ({
    step: own,
    at: axis.at[Math.max(0, lastNotAbove(step, own))],
    text: `${nameOf(event)}: ${event.text}${event.times > 1 ? ` (${count(event.times)} times in ${seconds(event.seconds)})` : ""}`,
    label: event.event === "phase" ? event.text.split(":")[0] : "",
    kind: isBad(event) ? "bad" : event.event === "checkpoint" ? "checkpoint" : "other",
  }));
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
    ${answer.value.steps && html`<p class="dim">divided as in the spans of ${stepsText(answer.value.steps)}</p>`}
    <table class="waterfall"><thead><tr><th>Lost to</th><th class="n">Measured</th>${predicted && html`<th class="n">Predicted</th>`}<th><span class="unseen">Share</span></th></tr></thead>
      <tbody>${lines.map((line, i) => html`
        <tr key=${line.name} class=${line.total ? "total" : ""}><td>${line.name}</td><td class="n">${percent(line.measured)}</td>
          ${predicted && html`<td class="n dim">${percent(line.predicted)}</td>`}
          <td class="fall"><i style=${{ marginLeft: share(Math.max(0, Math.min(...ends[i]))), width: share(Math.min(1, Math.abs(line.measured || 0))),
            background: line.total ? "var(--dim)" : classColour(LOSS_CLASSES[line.name] ?? line.name, i) }}></i></td></tr>`)}</tbody></table>
`;
}

/** @param {[number, number]} steps */
const stepsText = ([first, last]) => (first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`);

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
  const told = newest.reduce((sum, event) => sum + (event.times ?? 1), 0);
  return html`<ol class="events" tabindex="0" aria-label="Events, newest first">${newest.map((event) => html`
    <li key=${event.place} class=${isBad(event) ? "bad" : ""}><${Time} at=${event.time} /><b>${nameOf(event)}</b>
      <span>${event.text}${event.times > 1 && html` <b class="times">${count(event.times)} times in ${seconds(event.seconds)}</b>`} <${Where} event=${event} world=${world} /></span></li>`)}
    ${!events.length && html`<li class="dim">No events yet.</li>`}
    ${total > told && html`<li class="dim"><span></span><span></span><span>${count(total - told)} older events are in events.jsonl.</span></li>`}</ol>`;
}
