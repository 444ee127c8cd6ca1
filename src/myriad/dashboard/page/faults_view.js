/** Nodes and faults: heartbeats, decisions with their evidence, evictions, checkpoints. */

import { askJson, ROOT } from "./api.js";
import { bytes, count, plural, seconds } from "./format.js";
import { nameOf } from "./event_names.js";
import { html, useMemo, useState } from "./html.js";
import { useAnswer } from "./query.js";
import { hrefOf } from "./route.js";
import { Field, Problem, Time, Where } from "./widgets.js";

const MOST_NODES = 100;
const LATE_SECONDS = 30;

/** @param {{run: any, version: number}} props */
export function FaultsView({ run, version }) {
  const answer = useAnswer("faults", () => askJson("/api/faults"), version);
  const it = answer.value;
  return html`
    <section class="faults scroll" tabindex="0" aria-label="Nodes and faults">
      <${Problem} error=${answer.error} />
      <div class="columns">
        <div class="card nodes"><${Nodes} nodes=${it?.nodes ?? []} /></div>
        <div class="card wide">
          <h2>Faults and decisions, newest first</h2>
          <${Events} events=${it?.decisions} run=${run} nothing="No faults." />
          ${it?.num_decisions > it?.decisions.length && html`<p class="dim">${count(it.num_decisions - it.decisions.length)} older events are in events.jsonl.</p>`}
          <h2>Diagnoses</h2>
          <${Events} events=${it?.diagnoses} run=${run} nothing="No diagnoses." />
          <h2>Link counters around anomalies</h2>
          <${Evidence} files=${it?.evidence ?? []} />
          <h2>Evictions</h2>
          <${Events} events=${it?.evictions} run=${run} nothing="No node was evicted." />
        </div>
        <div class="card"><h2>Checkpoints</h2><${Checkpoints} checkpoints=${it?.checkpoints ?? []} /></div>
      </div>
    </section>`;
}

const WELL = new Set(["good", "ok", "healthy", "no complaint"]);

/** Return a predicate: a node is in trouble if its health is bad, or if it is silent while others are not. @param {any[]} nodes */
function troubles(nodes) {
  const newest = Math.min(...nodes.map((one) => one.heartbeat_seconds_ago ?? Infinity));
  return (one) => (one.health && !WELL.has(one.health)) || one.heartbeat_seconds_ago > newest + LATE_SECONDS;
}

/** Table of nodes, with nodes in trouble first. */
function Nodes({ nodes }) {
  const [filter, setFilter] = useState("");
  const troubled = useMemo(() => troubles(nodes), [nodes]);
  const sorted = useMemo(() => [...nodes].sort((a, b) => Number(troubled(b)) - Number(troubled(a))), [nodes]);
  const found = sorted.filter((one) => !filter || `${nodeText(one.node)} ${one.health ?? ""} ${machineText(one)} ${madeOf(one)}`.toLowerCase().includes(filter.toLowerCase()));
  const bad = nodes.filter(troubled).length;
  return html`
    <h2>${plural(nodes.length, "node")}${bad ? `, ${count(bad)} in trouble` : ""}</h2>
    <${Field} label="Find" value=${filter} size=${14} hint="name, health, machine or hardware" onChange=${setFilter} />
    <table><thead><tr><th>Node</th><th>Health</th><th class="n">Heartbeat</th><th class="n">Ranks</th><th>Machine</th><th class="n">Sent</th><th class="n">Received</th></tr></thead>
      <tbody>${found.slice(0, MOST_NODES).map((one) => html`
        <tr key=${one.node} class=${troubled(one) ? "bad" : ""}><td>${nodeText(one.node)}</td>
          <td class="text">${troubled(one) ? "▲ " : ""}${one.health ?? "not examined"}</td>
          <td class="n">${agoText(one.heartbeat_seconds_ago)}</td>
          <td class="n"><${Ranks} ranks=${one.ranks} /></td>
          <td class="text" title=${madeOf(one)}>${machineText(one)}</td>
          <td class="n">${rateText(one.sent_bytes_per_second)}</td><td class="n">${rateText(one.received_bytes_per_second)}</td></tr>`)}</tbody></table>
    ${found.length > MOST_NODES && html`<p class="dim">${count(found.length - MOST_NODES)} more nodes: narrow the search to see them.</p>`}`;
}

/** @param {number | null} ago seconds */
const agoText = (ago) => (ago === undefined || ago === null ? "–" : ago < 1 ? "now" : `${seconds(ago)} ago`);

const rateText = (rate) => (typeof rate === "number" ? `${bytes(rate)}/s` : "–");

/** Host, address, pod and GPUs, as far as the node has reported them. */
const machineText = (one) => [one.host, one.address, one.pod !== one.host && one.pod, one.gpus].filter(Boolean).join(" · ") || "–";

/** Hardware and versions of a node, for the tooltip and the search. */
const madeOf = (one) =>
  [one.cpu, ...(one.gpu_serials ?? []).filter(Boolean), ...(one.nics ?? []), ...Object.entries(one.versions ?? {}).map((pair) => pair.join(" "))].filter(Boolean).join("\n");

/** Link counters each 10 ms around anomalies. @param {{files: any[]}} props */
function Evidence({ files }) {
  if (!files.length) return html`<p class="dim">No anomaly was detected, so no counters were stored.</p>`;
  return html`<ul class="dated">${files.map((one) => html`
    <li key=${one.name}>${nodeText(one.node)}, ${one.why}: <a href=${`${ROOT}/api/around/${one.name}`} download>${one.name}</a></li>`)}</ul>`;
}

const nodeText = (node) => (typeof node === "number" ? `node ${node}` : node);

function Ranks({ ranks }) {
  if (!Array.isArray(ranks) || !ranks.length) return count(Array.isArray(ranks) ? 0 : ranks);
  const text = ranks[0] !== ranks.at(-1) ? `${ranks[0]}–${ranks.at(-1)}` : `${ranks[0]}`;
  return html`<a href=${hrefOf("parallel", { rank: ranks[0] })}>${text}</a>`;
}

/** Decisions, newest first, each with its rule and evidence. */
function Events({ events = [], run, nothing }) {
  if (!events.length) return html`<p class="dim">${nothing}</p>`;
  return html`<ol class="dated">${[...events].reverse().map((event) => html`
    <li key=${event.place}><${Time} at=${event.time} /><b>${nameOf(event)}</b> <${Where} event=${event} world=${run.world} /> <span>${event.text ?? ""}</span>
      ${event.rule && html`<div class="dim">rule: ${asText(event.rule)}</div>`}
      ${event.evidence && html`<details><summary>evidence</summary><pre>${asText(event.evidence)}</pre></details>`}</li>`)}</ol>`;
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

const WHOLE = new Set(["complete", "verified"]);

/** Table of checkpoints. A complete one has all its files; all were verified when they were written. */
function Checkpoints({ checkpoints }) {
  if (!checkpoints.length) return html`<p class="dim">None yet.</p>`;
  return html`
    <table><thead><tr><th class="n">Step</th><th>Tier</th><th>State</th><th class="n">Size</th></tr></thead>
      <tbody>${[...checkpoints].reverse().map((one) => html`
        <tr key=${`${one.step} ${one.tier} ${one.state}`} class=${one.state === "damaged" ? "bad" : ""} title=${one.problems?.join("; ")}>
          <td class="n">${count(one.step)}</td><td>${one.tier}</td>
          <td>${WHOLE.has(one.state) ? "✓" : "▲"} ${one.state}</td><td class="n">${bytes(one.bytes)}</td></tr>`)}</tbody></table>`;
}
