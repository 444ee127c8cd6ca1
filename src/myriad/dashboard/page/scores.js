/** Scores on tasks (`eval.tasks`): the newest value of each, and a small chart of all evaluations with their standard errors. */

import { niceRange } from "./chart_paint.js";
import { count, plain } from "./format.js";
import { html } from "./html.js";

const [WIDTH, HEIGHT, EDGE] = [220, 34, 4];

/**
 * @typedef {{name: string, documents: number | null, step: number[], value: (number | null)[], standard_error: (number | null)[]}} Score
 * @param {{scores: Score[], total: number}} props
 */
export function Scores({ scores, total }) {
  const several = scores.some((score) => score.step.length > 1);
  return html`
    <div class="card scores scroll" tabindex="0" aria-label="Scores on tasks">
      <h2>Scores on tasks</h2>
      <table><thead><tr><th>Score</th>${several && html`<th class="n">First</th><th>Over steps</th>`}
        <th class="n">Newest</th><th class="n">Standard error</th><th class="n">Step</th><th class="n">Documents</th></tr></thead>
        <tbody>${scores.map((score) => html`
          <tr key=${score.name}><td class="text">${score.name}</td>
            ${several && html`<td class="n dim" title="step ${count(score.step[0])}">${plain(score.value[0])}</td><td><${Spark} score=${score} /></td>`}
            <td class="n"><b>${plain(score.value.at(-1))}</b></td><td class="n">${errorText(score.standard_error.at(-1))}</td>
            <td class="n dim">${count(score.step.at(-1))}</td><td class="n dim">${count(score.documents)}</td></tr>`)}</tbody></table>
      ${total > scores.length && html`<p class="dim">${count(total - scores.length)} more scores are in events.jsonl.</p>`}
    </div>`;
}

const errorText = (error) => (error === null || error === undefined ? "–" : `± ${plain(error)}`);

/** Values as a line with dots, and one standard error around them as a band. @param {{score: Score}} props */
function Spark({ score }) {
  const points = score.step.map((step, i) => ({ step, value: score.value[i], error: score.standard_error[i] ?? 0 })).filter(({ value }) => value !== null);
  if (points.length < 2) return null;
  // As on the other charts, an outlier leaves at the top.
  const { low, high } = niceRange(points.flatMap(({ value, error }) => [value - error, value + error]));
  const [first, last] = [points[0].step, points.at(-1).step];
  const x = (step) => EDGE + ((step - first) / Math.max(1, last - first)) * (WIDTH - 2 * EDGE);
  const y = (value) => EDGE + (1 - (value - low) / (high - low)) * (HEIGHT - 2 * EDGE);
  const pairs = (list, of) => list.map((point) => `${x(point.step).toFixed(1)},${y(of(point)).toFixed(1)}`);
  const upper = pairs(points, ({ value, error }) => value + error);
  const lower = pairs(points.toReversed(), ({ value, error }) => value - error);
  const said = `${score.name}: ${plain(points[0].value)} at step ${count(first)}, ${plain(points.at(-1).value)} at step ${count(last)}`;
  return html`
    <svg class="spark" width=${WIDTH} height=${HEIGHT} role="img" aria-label=${said}>
      <polygon points=${[...upper, ...lower].join(" ")} />
      <polyline points=${pairs(points, ({ value }) => value).join(" ")} />
      ${points.map(({ step, value, error }) => html`
        <circle key=${step} cx=${x(step)} cy=${y(value)} r="2"><title>step ${count(step)}: ${plain(value)}${error ? ` ± ${plain(error)}` : ""}</title></circle>`)}
    </svg>`;
}
