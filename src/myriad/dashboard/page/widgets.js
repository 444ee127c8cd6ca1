/** Widgets that several views share. */

import { clock, count, wholeClock } from "./format.js";
import { html } from "./html.js";
import { hrefOf } from "./route.js";

/** @param {{label: string, value: string, options: (string | [string, string])[], onChange: (value: string) => void}} props */
export function Choice({ label, value, options, onChange }) {
  return html`
    <label class="choice"><span>${label}</span>
      <select value=${value} onChange=${(event) => onChange(event.target.value)}>
        ${options.map((option) => {
          const [name, text] = Array.isArray(option) ? option : [option, option];
          return html`<option key=${name} value=${name} selected=${name === value}>${text}</option>`;
        })}
      </select>
    </label>`;
}

/** An input field that takes effect on Enter or when it loses focus. @param {{label: string, value: string, size?: number, hint?: string, onChange: (value: string) => void}} props */
export function Field({ label, value, size = 10, hint = "", onChange }) {
  const take = (event) => event.target.value !== value && onChange(event.target.value.trim());
  return html`
    <label class="choice"><span>${label}</span>
      <input value=${value} size=${size} placeholder=${hint} title=${hint} spellcheck=${false} autocomplete="off" onChange=${take}
        onKeyDown=${(event) => event.key === "Enter" && take(event)} />
    </label>`;
}

/** @param {{label: string, checked: boolean, onChange: (checked: boolean) => void}} props */
export const Tick = ({ label, checked, onChange }) => html`
  <label class="tick"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} />${label}</label>`;

/** @param {{error?: Error}} props */
export const Problem = ({ error }) => error && html`<p class="problem" role="alert">${error.message}</p>`;

/** A figure with its name. @param {{name: string, value: any, note?: string}} props */
export const Figure = ({ name, value, note }) => html`<div class="figure"><span>${name}</span><b>${value}</b>${note && html`<small>${note}</small>`}</div>`;

/** @param {{at: number | null}} props seconds since the epoch */
export const Time = ({ at }) => html`<time title=${wholeClock(at)}>${clock(at)}</time>`;

/** Step, rank and node of an event; the rank leads to its place among others. @param {{event: any, world: number}} props */
export function Where({ event, world }) {
  const { step, rank, node } = event;
  const parts = [];
  if (step !== null && step !== undefined) parts.push(`step ${count(step)}`);
  if (node !== null && node !== undefined) parts.push(`node ${node}`);
  if (rank !== null && rank !== undefined) parts.push(rank < world ? html`<a href=${hrefOf("parallel", { rank })}>rank ${rank}</a>` : `rank ${rank}`);
  return html`<small class="where">${parts.map((part, i) => [i ? " · " : "", part])}</small>`;
}
