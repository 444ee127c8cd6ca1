/**
 * One stream of change notifications for all pages of a browser. A browser has six connections to a server (HTTP/1.1):
 * with a stream for each, six pages would leave none for requests.
 */

import { listen } from "./stream.js";

/** @type {Set<MessagePort>} */
const ports = new Set();
/** @type {any} */
let state = null;
/** @type {(() => void) | null} */
let stop = null;

const tellAll = (message) => {
  for (const port of ports) port.postMessage(message);
};

function begin() {
  stop = listen(
    () => tellAll({ changed: true }),
    (next) => {
      state = next;
      tellAll({ state });
    },
  );
}

function leave(port) {
  ports.delete(port);
  if (ports.size || !stop) return;
  stop();
  stop = state = null;
}

onconnect = ({ ports: [port] }) => {
  ports.add(port);
  port.onmessage = () => leave(port);
  // A page that connects later has missed the newest change.
  port.postMessage({ changed: true, state });
  if (!stop) begin();
};
