/**
 * Change notifications from the server. Reads the stream by `fetch`, so that silence is noticed: an EventSource
 * hides keep-alive comments, and with them that a machine has vanished.
 */

import { ask } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;
const SILENCE_MS = 45000;

/**
 * @param {(data: any) => void} onChanged
 * @param {(state: {here: boolean, since: number, retryAt: number}) => void} onState
 * @returns {() => void} stops it
 */
export function listen(onChanged, onState) {
  let stopped = false;
  let wait = FIRST_WAIT_MS;
  let since = 0;
  let timer = 0;
  /** @type {AbortController | null} */
  let request = null;

  async function attempt() {
    request = new AbortController();
    try {
      await readEvents(request, onChanged, () => {
        wait = FIRST_WAIT_MS;
        since = 0;
        onState({ here: true, since: 0, retryAt: 0 });
      });
    } catch {
      // Refused, ended or cut: the client retries in each case.
    }
    if (stopped) return;
    since ||= Date.now();
    const delay = wait * (0.8 + 0.4 * Math.random());
    onState({ here: false, since, retryAt: Date.now() + delay });
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    timer = setTimeout(attempt, delay);
  }

  attempt();
  return () => {
    stopped = true;
    clearTimeout(timer);
    request?.abort();
  };
}

/**
 * @param {AbortController} request
 * @param {(data: any) => void} onChanged
 * @param {() => void} onOpen
 */
async function readEvents(request, onChanged, onOpen) {
  let watchdog = setTimeout(() => request.abort(), SILENCE_MS);
  const response = await ask("/api/stream", {}, { signal: request.signal, cache: "no-store" });
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => request.abort(), SILENCE_MS);
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) dispatch(block, onChanged);
    }
  } finally {
    clearTimeout(watchdog);
  }
}

/** @param {string} block one event @param {(data: any) => void} onChanged */
function dispatch(block, onChanged) {
  const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
  if (data) onChanged(JSON.parse(data));
}
