/** The table of runs: filter, order, groups by a column or a key of the job, and the choice of runs for the charts. */

import { Swatch } from "./chart.js";
import { count, percent, plain, plural, seconds } from "./format.js";
import { html } from "./html.js";
import { amend } from "./route.js";
import { EditNotes } from "./runs_write.js";
import { changeText, lookOf } from "./runs_compare.js";
import { Choice, Field, Tick, Time } from "./widgets.js";

/** @typedef {Record<string, any>} Row */

/** Name for order and groups (none: neither), title, and cell of each column. @type {[string, string, (row: Row) => any, string?][]} */
const COLUMNS = [
  ["name", "Run", (row) => html`<a href="/run/${row.id}/" title=${row.path}>${row.name}</a>${row.problem && html`<small class="alarm-text">${row.problem}</small>`}`, "text named"],
  ["state", "State", (row) => html`<span class="state ${row.state}">${row.state}</span>`],
  ["job", "Job", (row) => row.job ?? "–"],
  ["layout", "Layout", (row) => row.layout || "–"],
  ["steps", "Steps", (row) => html`${count(row.steps)}${row.steps_planned !== null && html`<span class="dim"> / ${count(row.steps_planned)}</span>`}`, "n"],
  ["loss", "Loss", (row) => plain(row.loss), "n"],
  ["validation", "Best validation", (row) => html`${plain(row.best_validation)}${row.best_validation_step !== null && html`<span class="dim"> step ${count(row.best_validation_step)}</span>`}`, "n"],
  ["tokens_per_second", "Tokens/s", (row) => count(row.tokens_per_second === null ? null : Math.round(row.tokens_per_second)), "n"],
  ["mfu", "MFU", (row) => percent(row.mfu), "n"],
  ["started", "Started", (row) => html`<${Time} at=${row.started} />`],
  ["seconds", "Duration", (row) => seconds(row.seconds), "n"],
  ["tags", "Tags and note", (row) => html`<${Notes} row=${row} />`, "text"],
  ["", "Differs in", (row) => html`<${Differs} row=${row} />`, "text"],
  ["", "Changed by resumes", (row) => html`<${Changes} row=${row} />`, "text"],
];
const NEWEST_FIRST = "-started";

/** @param {{it: any, query: Record<string, string>, chosen: string[], onChosen: (ids: string[]) => void, onWritten: () => void, theme: import("./colours.js").Theme}} props */
export function RunsTable({ it, query, chosen, onChosen, onWritten, theme }) {
  const groups = groupsOf(it.runs, Boolean(query.group));
  const narrowed = query.filter ? `${count(it.matching)} of ${plural(it.total, "run")}` : plural(it.total, "run");
  return html`
    <div class="bar">
      <${Field} label="Filter" value=${query.filter ?? ""} size=${34} hint="base, state=finished, loss<3, optimizer.name!=muon" onChange=${(filter) => amend({ filter })} />
      <${Choice} label="Groups" value=${query.group ?? ""} options=${[["", "none"], ...it.columns, ...it.keys]} onChange=${(group) => amend({ group })} />
      <span class="dim" role="status">${narrowed}${it.matching > it.runs.length && `, the first ${count(it.runs.length)} are shown`}${it.unread > 0 && `; ${count(it.unread)} are not read yet`}</span>
      ${it.num_archived > 0 && html`<${Tick} label="${count(it.num_archived)} archived" checked=${query.archived === "1"} onChange=${(on) => amend({ archived: on ? "1" : undefined })} />`}
      ${chosen.length > 0 && html`<button onClick=${() => onChosen([])}>Clear the choice</button>`}
    </div>
    ${it.problems.map((text) => html`<p class="problem" key=${text}>${text}</p>`)}
    <div class="card runs ${chosen.length ? "above" : ""}" tabindex="0" role="region" aria-label="Table of runs">
      <table>
        <thead><tr><th><span class="unseen">In charts</span></th>${COLUMNS.map(([name, title, , kind]) => html`<${Head} key=${title} name=${name} title=${title} kind=${kind} sort=${query.sort || NEWEST_FIRST} />`)}</tr></thead>
        ${groups.map(({ value, rows }) => html`<tbody key=${value}>
          ${query.group && html`<tr class="group-of"><th colspan=${COLUMNS.length + 1} scope="rowgroup">${query.group} = ${value}<span class="dim"> · ${aboutGroup(rows)}</span></th></tr>`}
          ${rows.map((row) => html`<tr key=${row.id} class=${chosen.includes(row.id) ? "selected" : ""}>
            <td><${Chooser} row=${row} chosen=${chosen} most=${it.most_chosen} onChosen=${onChosen} theme=${theme} /></td>
            ${COLUMNS.map(([name, title, cell, kind]) => html`<td key=${title} class=${kind}>${cell(row)}${name === "tags" && it.may_write && html` <${EditNotes} row=${row} onWritten=${onWritten} />`}</td>`)}</tr>`)}
        </tbody>`)}
      </table>
      ${!it.runs.length && html`<p class="dim">${it.total ? "No run meets the filter." : "No runs yet."}</p>`}
    </div>
    ${!chosen.length && it.runs.length > 0 && html`<p class="dim">Choose up to ${it.most_chosen} runs to see their curves in the same charts, and what differs between them.</p>`}`;
}

/** Rows in groups of equal values, in the order of their first row. @param {Row[]} rows @returns {{value: string, rows: Row[]}[]} */
function groupsOf(rows, isGrouped) {
  if (!isGrouped) return [{ value: "", rows }];
  const found = new Map();
  for (const row of rows) found.set(row.group, [...(found.get(row.group) ?? []), row]);
  return [...found].map(([value, own]) => ({ value, rows: own }));
}

/** @param {Row[]} rows */
function aboutGroup(rows) {
  const known = rows.filter((row) => row.best_validation !== null);
  const best = known.reduce((least, row) => (least && least.best_validation <= row.best_validation ? least : row), null);
  return `${plural(rows.length, "run")}${best ? `, best validation ${plain(best.best_validation)} (${best.name})` : ""}`;
}

/** The title of a column; a click orders by it, a second one the other way around. */
function Head({ name, title, kind = "", sort }) {
  if (!name) return html`<th class=${kind}>${title}</th>`;
  const isDown = sort === `-${name}`;
  const order = isDown ? "descending" : sort === name ? "ascending" : undefined;
  const next = sort === name ? `-${name}` : isDown ? name : name === "started" ? NEWEST_FIRST : name;
  return html`<th class=${kind} aria-sort=${order}><button onClick=${() => amend({ sort: next })}>${title}${order && html`<span aria-hidden="true"> ${isDown ? "↓" : "↑"}</span>`}</button></th>`;
}

function Chooser({ row, chosen, most, onChosen, theme }) {
  const place = chosen.indexOf(row.id);
  const change = (event) => onChosen(event.target.checked ? [...chosen, row.id] : chosen.filter((id) => id !== row.id));
  return html`<label class="tick"><input type="checkbox" checked=${place >= 0} disabled=${place < 0 && chosen.length >= most} onChange=${change} aria-label="Show ${row.name} in charts" />
    ${place >= 0 && html`<${Swatch} one=${lookOf(place)} place=${place} theme=${theme} />`}</label>`;
}

/** @param {{row: Row}} props */
const Notes = ({ row }) => html`${row.archived && html`<span class="tag">archived</span>`}${row.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}${row.note}`;

/** @param {{row: Row}} props */
function Differs({ row }) {
  const text = row.differs.map(([key, value]) => `${key}=${value}`).join(" ");
  return html`${text}${row.num_differs > row.differs.length && html`<span class="dim"> and ${count(row.num_differs - row.differs.length)} more</span>`}`;
}

/** The newest change of the job, and who made it. @param {{row: Row}} props */
function Changes({ row }) {
  if (!row.changes.length) return "";
  return html`<span title=${row.changes.map(changeText).join("\n")}>${changeText(row.changes.at(-1))}</span>${row.num_changes > 1 && html`<span class="dim"> and ${count(row.num_changes - 1)} more</span>`}`;
}
