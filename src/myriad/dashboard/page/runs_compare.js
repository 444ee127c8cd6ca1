/** Chosen runs beside each other: their curves in the same charts, and what differs between their jobs and environments. */

import { askJson } from "./api.js";
import { Swatch } from "./chart.js";
import { axisOf } from "./chart_axes.js";
import { ChartGrid, curvesOf, lineOf, pointsOf, sharedAxes, smoothingOf } from "./curve_charts.js";
import { count, plain } from "./format.js";
import { html, useMemo, useRef } from "./html.js";
import { useAnswer } from "./query.js";
import { Problem } from "./widgets.js";

/** Colours of curves; runs beyond them have dashed lines. */
const COLOURS = 5;
const POINTS = 1000;

/** How the curves of a run look, by its place among the chosen ones. @param {number} place */
export const lookOf = (place) => ({ colour: place % COLOURS, dashed: place >= COLOURS });

/** @param {{rows: any[], query: Record<string, string>, chosen: string[], onChosen: (ids: string[]) => void, theme: import("./colours.js").Theme, ticks: number}} props */
export function Comparison({ rows, query, chosen, onChosen, theme, ticks }) {
  const runs = chosen.join(",");
  const known = rows.filter((row) => chosen.includes(row.id));
  const changed = known.map((row) => [row.id, row.steps, row.best_validation, row.state].join(" ")).join();
  const by = ["steps", "tokens", "FLOPs", "time"].includes(query.x) ? query.x : "steps";
  const range = query.first && query.last ? { first: query.first, last: query.last } : {};
  const waits = useRef(false);
  const curves = useAnswer(`${runs} ${by} ${range.first} ${range.last}`, () => askJson("/api/runs/curves", { runs, by, points: POINTS, ...range }), waits.current ? `${changed} ${ticks}` : changed);
  const read = curves.value?.runs.filter((run) => run.reading).map((run) => run.name) ?? [];
  waits.current = read.length > 0; // then the page asks again at each tick
  const diff = useAnswer(runs, () => askJson("/api/runs/diff", { runs }), changed);
  const shown = curves.value?.runs.filter((run) => chosen.includes(run.id)) ?? [];
  return html`
    <h2 class="unseen">Chosen runs</h2>
    <${Problem} error=${curves.error} />
    <p class="chips chosen">${shown.map((run) => html`
      <span class="chip" key=${run.id} title=${run.path}><${Swatch} one=${lookOf(chosen.indexOf(run.id))} place=${0} theme=${theme} />${run.name}
        <button class="plain" aria-label="Remove ${run.name} from charts" onClick=${() => onChosen(chosen.filter((id) => id !== run.id))}>×</button></span>`)}
      ${shown.length === 1 && html`<a href="/run/${shown[0].id}/">The page of this run, with its ranks and events</a>`}
      ${read.length > 0 && html`<span class="dim" role="status">Reading ${read.join(", ")}: a long run takes some seconds.</span>`}</p>
    <${Curves} runs=${shown} by=${curves.value?.by ?? by} chosen=${chosen} query=${query} theme=${theme} />
    <${Problem} error=${diff.error} />
    ${diff.value?.runs.length > 1 && html`<${Difference} it=${diff.value} />`}
    ${diff.value && html`<${Changes} it=${diff.value} />`}`;
}

function Curves({ runs, by, chosen, query, theme }) {
  const measured = useMemo(() => runs.filter((run) => run.columns.step.length > 0), [runs]);
  const axes = measured.length ? sharedAxes(measured.map((run) => run.columns)) : [];
  const smoothing = smoothingOf(query);
  const { axis, charts } = useMemo(() => chartsOf(measured, by, chosen, smoothing), [measured, by, chosen.join(), smoothing]);
  if (!axis.at.length) return runs.length > 0 && html`<p class="dim">${query.first ? "No chosen run has steps in this part." : "No chosen run has steps by this axis."}</p>`;
  const shown = html`<b>${axis.show(axis.at[0])}</b> to <b>${axis.show(axis.at.at(-1))}</b>`;
  return html`<${ChartGrid} ...${{ charts, axes, axis, marks: NO_MARKS, query, shown, whole: "Whole runs", theme }} />`;
}

/** @type {import("./chart.js").Mark[]} */
const NO_MARKS = [];

/** Charts of several runs on one axis, whose places are those of all runs. */
function chartsOf(runs, by, chosen, smoothing) {
  const lines = runs.map((run) => ({ ...run, axis: axisOf(run.columns, by, run.began), look: { key: run.id, ...lookOf(chosen.indexOf(run.id)) } }));
  const places = Float64Array.from(new Set(lines.flatMap((run) => run.axis.at))).sort();
  const at = Array.from(places);
  const axis = { ...axisOf({ step: [], tokens: [], total_flops: [], time: [] }, by, 0), step: at, at, many: true };
  const curve = (run, name) => ({ ...lineOf(run.name, run.columns[name], run.axis, smoothing), ...run.look, step: run.axis.at });
  const charts = curvesOf(runs.map((run) => run.columns)).map(([title, name, show]) => ({ key: name, title, show, series: lines.filter((run) => run.columns[name]).map((run) => curve(run, name)) }));
  const validated = lines.flatMap((run) => run.validation.slice(0, 1).map((one) => ({ ...pointsOf(one, run.axis), ...run.look, name: run.name })));
  const points = validated.map((one) => ({ ...one, step: one.x })).filter((one) => one.x.length);
  return { axis, charts: points.length ? [charts[0], { key: "validation", title: "Validation loss", show: plain, series: points }, ...charts.slice(1)] : charts };
}

/** Keys of the jobs and facts of the environments that are not equal. */
function Difference({ it }) {
  const parts = [["Job", it.job], ["Environment", it.environment]];
  return html`<div class="card runs" tabindex="0" role="region" aria-label="Differences">
    <h2>Differences</h2>
    <table class="difference"><thead><tr><th></th>${it.runs.map((run) => html`<th key=${run.id} scope="col" title=${run.path}>${run.name}</th>`)}</tr></thead>
      ${parts.map(([title, rows]) => html`<tbody key=${title}><tr class="group-of"><th colspan=${it.runs.length + 1} scope="rowgroup">${title}${!rows.length && html`<span class="dim"> · nothing recorded differs</span>`}</th></tr>
        ${rows.map(([key, texts]) => html`<tr key=${key}><th scope="row">${key}</th>${texts.map((text, i) => html`<td class="text" key=${it.runs[i].id}>${text ?? "–"}</td>`)}</tr>`)}</tbody>`)}
    </table></div>`;
}

/** What resumes changed in each run, and who did. */
function Changes({ it }) {
  const changed = it.runs.map((run, i) => ({ run, changes: it.changes[i] })).filter(({ changes }) => changes.length);
  if (!changed.length) return null;
  return html`<div class="card runs"><h2>Changed by resumes</h2>
    <dl>${changed.map(({ run, changes }) => html`<dt key=${run.id}>${run.name}</dt><dd>${changes.map((one, i) => html`<div key=${i}>${changeText(one)}</div>`)}</dd>`)}</dl></div>`;
}

/** @param {{key: string, before: string, after: string, step: number | null, user: string}} change */
export const changeText = ({ key, before, after, step, user }) => `${key}: ${before} → ${after}${step === null ? "" : `, step ${count(step)}`}${user && `, ${user}`}`;
