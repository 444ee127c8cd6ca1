/**
 * The address: `#/heat?phase=forward&by=node`. It holds every selection, so that a link
 * shows another person the same.
 */

import { useEffect, useState } from "./vendor/hooks.js";

/** @typedef {{view: string, query: Record<string, string>}} Route */

/** @type {Set<(route: Route) => void>} */
const listeners = new Set();
const WRITE_EVERY_MS = 300;
let current = parse();
let timer = 0;

/** @returns {Route} */
function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "overview", query: Object.fromEntries(new URLSearchParams(query)) };
}

/** @param {string} view @param {Record<string, any>} [query] */
export function hrefOf(view, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  // Commas and dashes of rank lists stay readable.
  const text = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString().replaceAll("%2C", ",");
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** To another view, with a step back. @param {string} view @param {Record<string, any>} [query] */
export function go(view, query) {
  write();
  history.pushState(null, "", hrefOf(view, query));
  follow();
}

/**
 * Changes what this view shows, without a step back. The address follows a little later: browsers refuse to
 * have it written at every frame of a drag.
 * @param {Record<string, any>} changes
 */
export function amend(changes) {
  current = { view: current.view, query: { ...current.query, ...changes } };
  timer ||= setTimeout(write, WRITE_EVERY_MS);
  notify();
}

function write() {
  if (!timer) return;
  clearTimeout(timer);
  timer = 0;
  history.replaceState(null, "", hrefOf(current.view, current.query));
}

function follow() {
  clearTimeout(timer);
  timer = 0;
  current = parse();
  notify();
}

function notify() {
  for (const listener of listeners) listener(current);
}

addEventListener("hashchange", follow);
addEventListener("popstate", follow);

/** @returns {Route} */
export function useRoute() {
  const [route, setRoute] = useState(current);
  useEffect(() => {
    listeners.add(setRoute);
    return () => void listeners.delete(setRoute);
  }, []);
  return route;
}
