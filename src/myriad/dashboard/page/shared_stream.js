/** The stream of all pages of this browser; a page's own where a browser has no shared workers. */

import { ROOT } from "./api.js";
import { listen } from "./stream.js";

/**
 * @param {() => void} onChanged
 * @param {(state: {here: boolean, since: number, retryAt: number}) => void} onState
 * @returns {() => void} stops it
 */
export function listenTogether(onChanged, onState) {
  if (typeof SharedWorker === "undefined") return listen(onChanged, onState);
  let stop = () => port.postMessage("bye");
  let stopped = false;
  const worker = new SharedWorker("/static/stream_worker.js", { type: "module", name: `stream ${ROOT}` });
  const { port } = worker;
  worker.onerror = () => {
    if (!stopped) stop = listen(onChanged, onState);
  };
  port.onmessage = ({ data }) => {
    if (stopped) return;
    if (data.state) onState(data.state);
    if (data.changed) onChanged();
  };
  const leave = () => {
    stopped = true;
    removeEventListener("pagehide", leave);
    stop();
  };
  addEventListener("pagehide", leave);
  return leave;
}
