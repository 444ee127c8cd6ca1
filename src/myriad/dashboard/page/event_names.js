/** Readable names of events; events.jsonl has names for programs. */

const NAMES = {
  job_changed: "job changed",
  restart_from_scratch: "from scratch",
  start_over: "start over",
  held: "in memory only",
  older_state: "older state",
  taken_over: "storage taken over",
  retry: "storing again",
  telemetry: "records",
  bad_block: "bad block",
  bad_record: "record left out",
  reread: "block read again",
};

/** Events that are faults, or that need an operator. */
const BAD = new Set(["fault", "eviction", "held", "start_over", "spike", "skip", "bad_block"]);

/** @param {{event: string}} event */
export const nameOf = ({ event }) => NAMES[event] ?? event.replaceAll("_", " ");

/** @param {{event: string}} event */
export const isBad = ({ event }) => BAD.has(event);
