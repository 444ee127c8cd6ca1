/** Requests to the server. If it requires a token, the browser sends it as the cookie that the page set. */

import { decodeTile } from "./tile.js";

/**
 * What comes before /api: "" for the page at /, "/run/ID" for the page of a run in a table. A worker has it in
 * its name.
 */
export const ROOT = typeof document === "undefined" ? self.name.slice("stream ".length) : location.pathname.replace(/\/+$/, "");

/** The server refused a request; the message is its reason. */
export class Refused extends Error {}

/** The server is unreachable. */
export class Gone extends Error {}

/**
 * @param {string} path begins with /api
 * @param {Record<string, any>} [query] without those that are undefined, null or ""
 * @param {RequestInit} [options]
 */
export async function ask(path, query = {}, options = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  let response;
  try {
    response = await fetch(`${ROOT}${path}${text ? `?${text}` : ""}`, options);
  } catch (problem) {
    if (options.signal?.aborted) throw problem;
    throw new Gone("the server does not answer");
  }
  if (!response.ok) throw new Refused(await reasonOf(response));
  return response;
}

/** Return the first line of an error response. @param {Response} response */
async function reasonOf(response) {
  const text = (await response.text()).slice(0, 400);
  if (response.status === 401 || response.status === 403) return "the server wants its token: open the address that it printed";
  try {
    const { error, detail } = JSON.parse(text);
    return String(error ?? detail ?? text);
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** @param {string} path @param {Record<string, any>} [query] @returns {Promise<any>} */
export const askJson = async (path, query) => (await ask(path, query)).json();

/** @param {string} path @param {Record<string, any>} [query] */
export const askTile = async (path, query) => decodeTile(await (await ask(path, query)).arrayBuffer());

/** @param {string} path @param {any} body @returns {Promise<any>} */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const text = await (await ask(path, {}, { method: "POST", headers, body: JSON.stringify(body) })).text();
  return text ? JSON.parse(text) : {};
}
