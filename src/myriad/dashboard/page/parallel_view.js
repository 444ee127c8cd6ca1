/** One rank: its position in the grid, its groups, the ranks that it waits for, and silent ranks. */

import { askJson, post, ROOT } from "./api.js";
import { AXES, coordinatesOf, placeOf, rangesText, rankAt, sizeOf, withWaiters } from "./grid.js";
import { count, plural, seconds } from "./format.js";
import { html, useState } from "./html.js";
import { useAnswer } from "./query.js";
import { amend, hrefOf } from "./route.js";
import { Choice, Field, Problem } from "./widgets.js";

const MOST_CHIPS = 64;
const TRACE_SECONDS = 5;
const GROUP_NAMES = { tp: "Tensor group", pp: "Pipeline group", dp: "Data group", cp: "Context group", ep: "Expert group" };

/** @param {{run: any, query: Record<string, string>, version: number, silent: any[]}} props */
export function ParallelView({ run, query, version, silent }) {
  const rank = Math.max(0, Math.min(run.world - 1, Math.trunc(Number(query.rank ?? silent[0]?.rank ?? 0)) || 0));
  const answer = useAnswer(`${rank}`, () => askJson(`/api/rank/${rank}`), version);
  const about = answer.key === `${rank}` ? answer.value : undefined;
  return html`
    <section class="parallel scroll" tabindex="0" aria-label="Parallel view">
      <div class="bar">
        <${Field} label="Rank" value=${String(rank)} size=${7} hint="0 to ${run.world - 1}" onChange=${(value) => amend({ rank: value })} />
        <button disabled=${rank === 0} onClick=${() => amend({ rank: rank - 1 })} aria-label="Previous rank">‹</button>
        <button disabled=${rank === run.world - 1} onClick=${() => amend({ rank: rank + 1 })} aria-label="Next rank">›</button>
        <a class="button" href=${hrefOf("timeline", { rank, ranks: rangesText(withWaiters(run.layout, rank)), steps: `${run.last_step}` })}>Timeline with waiting ranks</a>
        <${Trace} rank=${rank} key=${rank} />
      </div>
      <${Problem} error=${answer.error} />
      <${Silent} silent=${silent} run=${run} />
      <div class="columns">
        <div class="card">
          <h2>Rank ${rank}</h2>
          <${Facts} run=${run} rank=${rank} about=${about} />
        </div>
        <div class="card wide">
          <h2>Replica ${coordinatesOf(run.layout, rank).dp}: pipeline stages across, tensor ranks down</h2>
          <${Replica} run=${run} rank=${rank} about=${about} silent=${silent} />
        </div>
      </div>
      <div class="card">
        ${AXES.toReversed().filter((axis) => about?.groups?.[axis]?.length > 1).map((axis) => html`
          <${Group} key=${axis} name="${GROUP_NAMES[axis]}, ${axis}" ranks=${about.groups[axis]} rank=${rank} about=${about} silent=${silent} />`)}
        ${run.world === 1 && html`<p class="dim">This run has one rank, so no rank waits for another.</p>`}
      </div>
    </section>`;
}

/** Silent ranks: in a hang they are the suspects, because they do not wait for others. */
function Silent({ silent, run }) {
  if (!silent.length) return null;
  return html`
    <div class="card alarm" role="status">
      <h2>${silent.length === 1 ? `Rank ${silent[0].rank} is silent` : `${plural(silent.length, "rank")} are silent`} while others wait</h2>
      <table><thead><tr><th class="n">Rank</th><th>Node</th><th>Position</th><th>Action</th><th>Last finished</th><th class="n">Step</th><th class="n">Ago</th><th class="n">Waited for by</th></tr></thead>
        <tbody>${silent.slice(0, 20).map((one) => html`
          <tr key=${one.rank}><td class="n"><a href=${hrefOf("parallel", { rank: one.rank })}>${one.rank}</a></td>
            <td>${run.nodes[Math.floor(one.rank / run.node_size)]}</td><td>${placeOf(run.layout, one.rank)}</td>
            <td>${one.is_in}</td><td>${one.last_entered?.name ?? "nothing"}</td><td class="n">${count(one.last_entered?.step)}</td>
            <td class="n">${seconds(one.last_entered?.seconds_ago)}</td>
            <td class="n">${plural(one.waited_for_by ?? 0, "rank")}</td></tr>`)}</tbody></table>
    </div>`;
}

function Facts({ run, rank, about }) {
  const last = about?.last_entered;
  const rows = [
    ["Node", run.nodes[Math.floor(rank / run.node_size)]],
    ["Position", placeOf(run.layout, rank)],
    ["Action", about?.is_in ?? (run.state === "hangs" ? "unknown" : "shown when the run hangs")],
    ["Last finished", last ? `${last.name}, step ${count(last.step)}, ${seconds(last.seconds_ago)} ago` : "nothing yet"],
    ["Waits for", about?.waits_for?.length ? html`<${Chips} ranks=${about.waits_for} rank=${rank} />` : "no rank"],
    ["Silent", about?.silent ? "yes: other ranks wait for it, and it has started no action" : "no"],
  ];
  return html`<dl>${rows.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value ?? "–"}</dd>`)}</dl>`;
}

/** Grid of the ranks of this rank's model replica. */
function Replica({ run, rank, about, silent }) {
  const at = coordinatesOf(run.layout, rank);
  const [stages, tensor] = [sizeOf(run.layout, "pp"), sizeOf(run.layout, "tp")];
  const rows = Array.from({ length: tensor }, (_, tp) => Array.from({ length: stages }, (_, pp) => rankAt(run.layout, { ...at, pp, tp })));
  return html`
    <div class="scroll"><table class="replica"><thead><tr><th><span class="unseen">Tensor rank</span></th>${rows[0].map((_, pp) => html`<th key=${pp}>pp ${pp}</th>`)}</tr></thead>
      <tbody>${rows.map((ranks, tp) => html`<tr key=${tp}><th>tp ${tp}</th>${ranks.map((each) => html`
        <td key=${each}><${Chip} rank=${each} kind=${kindOf(each, rank, about, silent)} /></td>`)}</tr>`)}</tbody></table></div>
    <p class="dim key"><span class="chip me">this rank</span> <span class="chip awaited">waited for</span> <span class="chip silent">silent</span></p>`;
}

const kindOf = (each, rank, about, silent) =>
  each === rank ? "me" : silent.some((one) => one.rank === each) ? "silent" : about?.waits_for?.includes(each) ? "awaited" : "";

const Chip = ({ rank, kind = "" }) => html`<a class="chip ${kind}" href=${hrefOf("parallel", { rank })}
  aria-label="rank ${rank}${kind === "silent" ? ", silent" : kind === "awaited" ? ", waited for" : ""}" aria-current=${kind === "me" ? "true" : undefined}>${rank}</a>`;

/** Ranks of a group; of a large group those near this rank. */
function Chips({ ranks, rank, about, silent = [] }) {
  const from = Math.max(0, Math.min(ranks.indexOf(rank) - MOST_CHIPS / 2, ranks.length - MOST_CHIPS));
  const shown = ranks.slice(from, from + MOST_CHIPS);
  return html`<span class="chips">${shown.map((each) => html`<${Chip} key=${each} rank=${each} kind=${kindOf(each, rank, about, silent)} />`)}
    ${shown.length < ranks.length && html`<span class="dim">${shown.length} of ${count(ranks.length)}: from ${shown[0]} to ${shown.at(-1)}</span>`}</span>`;
}

const Group = ({ name, ranks, ...rest }) => html`<div class="group"><h3>${name} of ${count(ranks.length)}</h3><${Chips} ranks=${ranks} ...${rest} /></div>`;

/** What can be asked of a rank at work: as `myriad trace --what` calls it, and for people. */
const LOOKS = [["profile", "operators"], ["stacks", "stacks"], ["flight", "collectives"]];

/** Asks the run for a look into this rank, and offers its files or says why there are none. @param {{rank: number}} props */
function Trace({ rank }) {
  const [what, setWhat] = useState("profile");
  const [answer, setAnswer] = useState({ text: "", files: [], busy: false });
  const ask = async () => {
    setAnswer({ text: what === "profile" ? `tracing for ${TRACE_SECONDS} s…` : "looking…", files: [], busy: true });
    try {
      const { files = [], problems = [] } = await post("/api/trace", { ranks: [rank], seconds: TRACE_SECONDS, what });
      setAnswer({ text: problems.join("; ") || (files.length ? "" : "the run gave no trace"), files, busy: false });
    } catch (problem) {
      setAnswer({ text: problem.message, files: [], busy: false });
    }
  };
  return html`<${Choice} label="Look at" value=${what} options=${LOOKS} onChange=${setWhat} />
    <button onClick=${ask} disabled=${answer.busy}>${what === "profile" ? `Trace it for ${TRACE_SECONDS} s` : "Ask the rank"}</button>
    <span class="dim said-of-trace" role="status">${answer.text}${answer.files.map((file) => html`
      <a key=${file} href="${ROOT}/api/traces/${encodeURIComponent(file.split("/").pop())}" download>${file}</a>`)}</span>`;
}
