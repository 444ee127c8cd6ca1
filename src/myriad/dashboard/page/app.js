/**
 * The page: one sentence on the state of the run, and five views. A change notification from the server
 * increments a version, and views then repeat their requests.
 */

import { askJson, ROOT } from "./api.js";
import { FaultsView } from "./faults_view.js";
import { count } from "./format.js";
import { HeatView } from "./heat_view.js";
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./html.js";
import { OverviewView } from "./overview_view.js";
import { ParallelView } from "./parallel_view.js";
import { useAnswer } from "./query.js";
import { hrefOf, useRoute } from "./route.js";
import { listenTogether } from "./shared_stream.js";
import { useTheme } from "./theme.js";
import { TimelineView } from "./timeline_view.js";

const VIEWS = {
  overview: ["Overview", OverviewView],
  heat: ["Heat map", HeatView],
  timeline: ["Timeline", TimelineView],
  parallel: ["Parallel view", ParallelView],
  faults: ["Nodes and faults", FaultsView],
};
const NEEDS_SPANS = new Set([HeatView, TimelineView]);
const REFRESH_MS = 1000;
/** After this time, a hidden page closes its stream of notifications. */
const HIDDEN_MS = 2000;
const STATES = { reading: "…", starting: "…", training: "●", finished: "✓", hangs: "▲", failed: "▲", interrupted: "■", new: "○" };

function App() {
  const route = useRoute();
  const [theme, changeTheme] = useTheme();
  const { version, link } = useChanges();
  const run = useAnswer("run", () => askJson("/api/run"), version);
  const hangs = run.value?.state === "hangs";
  const silent = useAnswer(hangs ? "silent" : "", () => askJson("/api/silent"), version);
  const [title, View] = Object.hasOwn(VIEWS, route.view) ? VIEWS[route.view] : VIEWS.overview;
  useEffect(() => {
    if (run.value) document.title = `${run.value.name}: ${title}`;
  }, [run.value?.name, title]);
  const waitsForSpans = NEEDS_SPANS.has(View) && run.value?.first_step === null;
  const silentRanks = (hangs && silent.value?.silent) || [];
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <header>
      <div class="head"><b class="brand">Myriad</b>${ROOT && html`<a href="/">All runs</a>`}${run.value && html`<${State} run=${run.value} silent=${silentRanks} />`}
        <button class="plain" onClick=${changeTheme} aria-label="Use ${theme === "dark" ? "light" : "dark"} colours">${theme === "dark" ? "☀" : "☾"}</button></div>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([name, [text, view]]) => html`
        <a key=${name} href=${hrefOf(name, carried(route, name))} aria-current=${view === View ? "page" : undefined}>${text}</a>`)}</nav>
    </header>
    <${Link} link=${link} />
    <main id="main" tabindex="-1">
      <h1 class="unseen">${run.value ? `${run.value.name}: ${title}` : title}</h1>
      ${run.error && !run.value && html`<p class="problem" role="alert">${run.error.message}</p>`}
      ${waitsForSpans && html`
        <p class="dim">No spans have arrived yet. Ranks record them from the first step on, and they appear here some seconds later.</p>`}
      ${run.value && !waitsForSpans && html`<${Guarded} key=${route.view} view=${View} run=${run.value} query=${route.query} version=${version} theme=${theme} silent=${silentRanks} />`}
    </main>`;
}

/** A view, or its error message, so that an error does not break the rest of the page. */
function Guarded({ view, ...props }) {
  const [error, again] = useErrorBoundary((problem) => console.error(problem));
  if (error) return html`<p class="problem" role="alert">This view cannot be shown: ${error.message}. <button class="link" onClick=${again}>Try again</button></p>`;
  return html`<${view} ...${props} />`;
}

/** A chosen rank stays chosen in other views. */
const carried = ({ query }, view) => (query.rank !== undefined && ["heat", "parallel"].includes(view) ? { rank: query.rank } : {});

/** Move the focus without changing the address's hash, which selects the view. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

/** Name and state of the run, with a sentence that describes it. */
function State({ run, silent }) {
  return html`
    <span class="name" title=${run.name}>${run.name}</span>
    <span class="state ${run.state}" role="status"><span aria-hidden="true">${STATES[run.state] ?? "●"}</span> ${run.state}</span>
    <p class="sentence">${run.sentence.charAt(0).toUpperCase()}${run.sentence.slice(1)}.
      ${silent.length > 0 && html` <a href=${hrefOf("parallel", { rank: silent[0].rank })}>Silent: rank ${silent.slice(0, 5).map((one) => one.rank).join(", ")}${silent.length > 5 ? ` and ${count(silent.length - 5)} more` : ""}</a>`}</p>`;
}

/** Count the server's change notifications, at most one a second; paused while the page is hidden. */
function useChanges() {
  const [version, setVersion] = useState(0);
  const [link, setLink] = useState({ here: true, since: 0, retryAt: 0 });
  const state = useRef({ timer: 0, stale: false, wasGone: false });
  useEffect(() => {
    const now = state.current;
    const count_ = () => {
      now.timer = 0;
      if (document.hidden) now.stale = true;
      else setVersion((before) => before + 1);
    };
    const changed = () => (now.timer ||= setTimeout(count_, REFRESH_MS));
    const begin = () =>
      listenTogether(changed, (next) => {
        if (next.here && now.wasGone) count_();
        now.wasGone = !next.here;
        setLink(next);
      });
    let stop = null;
    let timer = 0;
    const follow = () => {
      clearTimeout(timer);
      if (!document.hidden) {
        stop ??= begin();
        if (now.stale) changed();
        now.stale = false;
      } else if (stop) {
        timer = setTimeout(() => {
          stop();
          stop = null;
        }, HIDDEN_MS);
      }
    };
    document.addEventListener("visibilitychange", follow);
    // A page restored from the back/forward cache has lost its stream.
    const shown = ({ persisted }) => {
      if (!persisted) return;
      stop?.();
      stop = null;
      follow();
    };
    addEventListener("pageshow", shown);
    follow();
    return () => {
      clearTimeout(timer);
      stop?.();
      removeEventListener("pageshow", shown);
      document.removeEventListener("visibilitychange", follow);
    };
  }, []);
  return { version, link };
}

/** Shows since when the server is unreachable, and when the page retries. */
function Link({ link }) {
  const [, tick] = useState(0);
  useEffect(() => {
    if (link.here) return;
    const timer = setInterval(() => tick((before) => before + 1), 1000);
    return () => clearInterval(timer);
  }, [link.here]);
  if (link.here) return html`<div role="status" class="link-state"></div>`;
  const again = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
  return html`<div role="status" class="link-state gone">The server has been unreachable since ${new Date(link.since).toLocaleTimeString("en-GB")}; the page shows the data from then.
    <span aria-hidden="true"> Retrying${again ? ` in ${again} s` : ""}.</span></div>`;
}

render(html`<${App} />`, document.getElementById("app"));
