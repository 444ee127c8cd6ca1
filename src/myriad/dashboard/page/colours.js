/**
 * Colours, the same in both themes' meaning and safe for colour-blind eyes: blue against orange for faster and
 * slower, cividis for amounts, and no two kinds of time that look alike without red, green or blue cones
 * (`tests/browser/test_page_colours.py` measures it). As 32-bit words (0xAABBGGRR) for rasters, as text for everything else.
 */

/** @typedef {"light" | "dark"} Theme */

const SLOW_AND_FAST = {
  light: ["#053061", "#2f79b5", "#9fc5de", "#e9ecef", "#f6b26b", "#d9480f", "#7f1007"],
  dark: ["#8fd0ff", "#3f93d6", "#2c5474", "#29313b", "#8a5320", "#f0701d", "#ffc078"],
};
/** In both themes the slowest end also differs from all others in lightness. */
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

/** Colour of ranks without a value: grey beside blue and orange, and outside of the scale from blue to yellow. */
const UNKNOWN = { z: { light: "#777777", dark: "#999999" }, ms: { light: "#ccddee", dark: "#332211" } };

/** Waiting has the warm colours, pale because there is much of it: arrows and work stand out. */
const SPAN_COLOURS = {
  forward: "#5ea1ff",
  backward: "#4ba37a",
  backward_input: "#25938e",
  backward_weight: "#e0a02e",
  load: "#e9cd21",
  step: "#909fb2",
  update: "#909fb2",
  orthogonalize: "#909fb2",
  tensor_comm: "#7a4fa3",
  expert_comm: "#84180f",
  context_comm: "#aa5500",
  ring_attention: "#23407a",
  checkpoint_copy: "#8c6d4f",
  collect_garbage: "#e75d9e",
  evaluate: "#87c7d1",
};
const PIPELINE = "exchange wait receive";
const MATRICES = "await_momentum await_scatter";
const ACROSS = "reduce_across await_across";
const DATA = `gather await_gather reduce await_reduce ${ACROSS} gather_tied reduce_tied sync_tied clip ${MATRICES}`;
const POSTS = "start_gather start_reduce start_across start_momentum start_scatter send release";
const COPIES =
  "start_offload await_offload start_fetch await_fetch start_state_in await_state_in start_state_out await_state_out";
const PAIRED = "paired_forward paired_backward";
for (const name of PAIRED.split(" ")) SPAN_COLOURS[name] = "#6478dc";
for (const name of PIPELINE.split(" ")) SPAN_COLOURS[name] = "#dd7f52";
for (const name of DATA.split(" ")) SPAN_COLOURS[name] = "#f2cda9";
for (const name of POSTS.split(" ")) SPAN_COLOURS[name] = "#cabdfb";
for (const name of COPIES.split(" ")) SPAN_COLOURS[name] = "#6d585c";
/** Spans whose chunk is a step of a ring (as in `span_records`). */
export const RING_SPANS = ["context_comm", "ring_attention"];
/** Names of spans of a program that trains nothing begin so. */
export const INSIDE_EVALUATION = "evaluate_";
const OTHERS = ["#5f8aa6", "#9c7b55", "#6f8f4f", "#a86a8f", "#7580a8"];

/** Of each class of time (`myriad.telemetry.span_io.span_records.CLASSES`) and each line of the ledger (as in the report). */
const CLASS_COLOURS = {
  compute: "#5ea1ff",
  tp: "#7a4fa3",
  ep: "#84180f",
  cp: "#aa5500",
  pp: "#dd7f52",
  dp: "#f2cda9",
  bubble: "#cba305",
  optimizer: "#909fb2",
  data: "#e9cd21",
  offload: "#b7a27c",
  checkpoint: "#8c6d4f",
  garbage: "#e75d9e",
  other: "#7d8894",
  training: "#3a8f5c",
  lost: "#b3403a",
  saving: "#e8c547",
  validating: "#87c7d1",
  checking: "#4b3d50",
  slow: "#8f7fc9",
  detecting: "#1f5fa8",
  diagnosing: "#348495",
  starting: "#96b4ff",
  restarting: "#b07c1e",
  planned: "#9fb3a4",
  waiting: "#6b6b6b",
  person: "#d78bb0",
};

/** @param {string} name @param {number} index of it */
export const classColour = (name, index) => CLASS_COLOURS[name] ?? OTHERS[index % OTHERS.length];

/** What a legend of spans shows: text and the names that it stands for. */
export const SPAN_LEGEND = [
  ["forward", "forward"],
  ["backward", "backward"],
  ["backward, input half", "backward_input"],
  ["backward, weight half", "backward_weight"],
  ["forward and backward in a pair", PAIRED],
  ["tensor", "tensor_comm"],
  ["experts", "expert_comm"],
  ["context", "context_comm"],
  ["ring attention", "ring_attention"],
  ["pipeline wait", PIPELINE],
  ["replica wait", DATA],
  ["posting", POSTS],
  ["optimizer", "step update orthogonalize"],
  ["data", "load"],
  ["host copy", COPIES],
  ["checkpoint copy", "checkpoint_copy"],
  ["garbage collection", "collect_garbage"],
  ["evaluation", "evaluate"],
];

/** @param {string} name of a span */
export function spanColour(name) {
  if (Object.hasOwn(SPAN_COLOURS, name)) return SPAN_COLOURS[name];
  if (name.startsWith(INSIDE_EVALUATION)) return mixed(SPAN_COLOURS.evaluate, spanColour(name.slice(INSIDE_EVALUATION.length)), 0.35);
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return OTHERS[hash % OTHERS.length];
}

/** @param {string} text #rrggbb @returns {[number, number, number]} */
const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

/** @param {string} text #rrggbb */
export function word(text) {
  const [red, green, blue] = channels(text);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Part of the way from one colour to another. @param {string} from @param {string} to @param {number} share */
export function mixed(from, to, share) {
  const [a, b] = [channels(from), channels(to)];
  return `#${a.map((value, i) => Math.round(value + (b[i] - value) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** 256 steps between stops at equal distances. @param {string[]} stops */
function ramp(stops) {
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    return word(mixed(stops[below], stops[below + 1], at - below));
  });
}

const RAMPS = { z: { light: ramp(SLOW_AND_FAST.light), dark: ramp(SLOW_AND_FAST.dark) }, ms: { light: ramp(CIVIDIS), dark: ramp(CIVIDIS) } };

/** @param {"z" | "ms"} scale @param {Theme} theme */
export const stopsOf = (scale, theme) => (scale === "z" ? SLOW_AND_FAST[theme] : CIVIDIS);

/** @param {"z" | "ms"} scale @param {Theme} theme */
export const unknownOf = (scale, theme) => UNKNOWN[scale][theme];

/**
 * What colours mean now: symmetric for scores, and never so narrow that noise looks like a fault; from the
 * least to the largest for amounts.
 * @param {ArrayLike<number>} values @param {"z" | "ms"} scale @param {[number, number]} [limits] least and largest end of the scale of scores
 * @returns {[number, number]}
 */
export function domainOf(values, scale, [least, most] = [6, 30]) {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < values.length; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  if (scale === "z") {
    const limit = Math.min(Math.max(least, -low, high), most);
    return Number.isFinite(limit) ? [-limit, limit] : [-least, least];
  }
  return low <= high ? [low, high > low ? high : low + 1e-9] : [0, 1];
}

/**
 * @param {ArrayLike<number>} values one a rank; NaN: unknown
 * @param {[number, number]} domain @param {"z" | "ms"} scale @param {Theme} theme @param {Uint32Array} into
 */
export function paintValues(values, [low, high], scale, theme, into) {
  const table = RAMPS[scale][theme];
  const unknown = word(unknownOf(scale, theme));
  const factor = 255 / (high - low);
  for (let i = 0; i < into.length; i++) {
    const value = values[i];
    const at = ((value - low) * factor + 0.5) | 0;
    into[i] = value !== value ? unknown : table[at < 0 ? 0 : at > 255 ? 255 : at];
  }
}
