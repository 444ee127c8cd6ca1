/**
 * The page of many runs: their table, and below it the charts and the differences of those that are chosen. The
 * address keeps filter, order, groups and choice. The page asks again every few seconds while it is visible.
 */

import { askJson } from "./api.js";
import { html, render, useEffect, useErrorBoundary, useState } from "./html.js";
import { useAnswer } from "./query.js";
import { amend, useRoute } from "./route.js";
import { Comparison } from "./runs_compare.js";
import { RunsTable } from "./runs_table.js";
import { WriteBar } from "./runs_write.js";
import { useTheme } from "./theme.js";
import { Problem } from "./widgets.js";

const REFRESH_MS = 4000;

function App() {
  const { query } = useRoute();
  const [theme, changeTheme] = useTheme();
  const version = useTicks();
  const state = useAnswer("run", () => askJson("/api/run"), version);
  const { filter, sort, group, archived } = query;
  const [writes, setWrites] = useState(0);
  const onWritten = () => setWrites((before) => before + 1);
  const table = useAnswer(`runs ${filter} ${sort} ${group} ${archived}`, () => askJson("/api/runs", { filter, sort, group, archived }), `${version} ${writes}`);
  const chosen = (query.runs ?? "").split(",").filter(Boolean);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the runs</a>
    <header class="of-runs">
      <div class="head"><b class="brand">Myriad</b><p class="sentence" role="status">${state.value ? `${state.value.sentence}.` : ""}</p>
        <button class="plain" onClick=${changeTheme} aria-label="Use ${theme === "dark" ? "light" : "dark"} colours">${theme === "dark" ? "☀" : "☾"}</button></div>
    </header>
    <main id="main" tabindex="-1">
      <h1 class="unseen">Runs</h1>
      <section class="scroll" tabindex="0" aria-label="Runs">
        <${Problem} error=${table.error} />
        ${table.value && html`<${Guarded} view=${RunsTable} it=${table.value} query=${query} chosen=${chosen} onChosen=${choose} onWritten=${onWritten} theme=${theme} />`}
        ${table.value?.may_write && html`<${Guarded} view=${WriteBar} rows=${table.value.runs} chosen=${chosen} onChosen=${choose} onWritten=${onWritten} />`}
        ${table.value && chosen.length > 0 && html`<${Guarded} view=${Comparison} rows=${table.value.runs} query=${query} chosen=${chosen} onChosen=${choose} theme=${theme} ticks=${version} />`}
      </section>
    </main>`;
}

/** @param {string[]} ids of the runs to show in charts; another choice shows them whole */
const choose = (ids) => amend({ runs: ids.join(","), first: undefined, last: undefined });

/** A part of the page, or its error message, so that an error does not break the rest of the page. */
function Guarded({ view, ...props }) {
  const [error, again] = useErrorBoundary((problem) => console.error(problem));
  if (error) return html`<p class="problem" role="alert">This part cannot be shown: ${error.message}. <button class="link" onClick=${again}>Try again</button></p>`;
  return html`<${view} ...${props} />`;
}

/** Move the focus without changing the address's hash, which holds the choices. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** Counts up while the page is visible. */
function useTicks() {
  const [ticks, setTicks] = useState(0);
  useEffect(() => {
    const tick = () => document.hidden || setTicks((before) => before + 1);
    const timer = setInterval(tick, REFRESH_MS);
    document.addEventListener("visibilitychange", tick);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", tick);
    };
  }, []);
  return ticks;
}

render(html`<${App} />`, document.getElementById("app"));
