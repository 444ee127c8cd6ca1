/**
 * A timeline tile, made ready to be drawn: lanes in the order of the screen (a predicted one under its measured
 * one), each with its spans by start, so that what is visible is found by bisection.
 *
 * @typedef {object} Lane
 * @property {number} rank @property {number} worstOf how many ranks it stands for @property {boolean} predicted
 * @property {number} from first of its spans @property {number} to one after its last
 *
 * @typedef {object} Lanes
 * @property {Lane[]} lanes @property {Map<number, number>} laneOf measured lane of each rank that has one
 * @property {Float64Array} start @property {Float64Array} stop @property {Float64Array} reach latest stop so far in the lane
 * @property {Uint16Array} name @property {Int16Array} stage @property {Int16Array} microBatch @property {Int16Array} chunk
 * @property {string[]} names @property {string[]} drawn those that a span here has
 * @property {{fromRank: Int32Array, toRank: Int32Array, fromAt: Float64Array, toAt: Float64Array, kind: Uint8Array}} arrows
 * @property {boolean} arrowsToCome they are not all known yet
 * @property {number} begin of the window, seconds since the run's first span @property {number} end
 */

/** @param {{facts: any, arrays: Record<string, any>}} tile @returns {Lanes} */
export function arrangeLanes({ facts, arrays }) {
  const order = laneOrder(facts.lanes);
  const place = new Int32Array(facts.lanes.length);
  order.forEach((lane, i) => (place[lane] = i));

  const count = arrays.lane.length;
  const by = sortedSpans(arrays, place, count);

  const made = {
    lanes: order.map((at) => {
      const { rank, worst_of = 1, predicted = false } = facts.lanes[at];
      return { rank, worstOf: worst_of, predicted, from: 0, to: 0 };
    }),
    laneOf: new Map(),
    start: new Float64Array(count),
    stop: new Float64Array(count),
    reach: new Float64Array(count),
    name: new Uint16Array(count),
    stage: new Int16Array(count),
    microBatch: new Int16Array(count),
    chunk: new Int16Array(count),
    names: facts.names,
    drawn: [...new Set(arrays.name)].map((code) => facts.names[code]),
    arrows: {
      fromRank: arrays.from_rank,
      toRank: arrays.to_rank,
      fromAt: arrays.from_at,
      toAt: arrays.to_at,
      kind: arrays.kind,
    },
    arrowsToCome: Boolean(facts.arrows_to_come),
    begin: facts.start,
    end: facts.end,
  };
  fillSpans(made, by, place, arrays);
  made.lanes.forEach((each, i) => each.predicted || made.laneOf.set(each.rank, i));
  return made;
}

/**
 * Indices of spans by lane, then start; at one start the longer is the outer one, and first. Counts lanes, and
 * sorts only inside those that came unsorted: a hundred thousand spans may not cost a frame.
 * @param {Record<string, any>} arrays @param {Int32Array} place
 */
function sortedSpans({ lane, start, duration }, place, count) {
  const ends = new Uint32Array(place.length + 1);
  for (let i = 0; i < count; i++) ends[place[lane[i]] + 1]++;
  for (let i = 0; i < place.length; i++) ends[i + 1] += ends[i];
  const next = ends.slice();
  const by = new Uint32Array(count);
  for (let i = 0; i < count; i++) by[next[place[lane[i]]]++] = i;
  const before = (a, b) => start[a] - start[b] || duration[b] - duration[a];
  for (let at = 0; at < place.length; at++) {
    const part = by.subarray(ends[at], ends[at + 1]);
    for (let i = 1; i < part.length; i++) {
      if (before(part[i - 1], part[i]) > 0) {
        part.sort(before);
        break;
      }
    }
  }
  return by;
}

/** Lanes as the screen has them: measured in the order that came, its prediction under each. */
function laneOrder(lanes) {
  const predicted = new Map(lanes.flatMap((lane, i) => (lane.predicted ? [[lane.rank, i]] : [])));
  const order = [];
  lanes.forEach((lane, i) => {
    if (lane.predicted) return;
    order.push(i);
    if (predicted.has(lane.rank)) order.push(predicted.get(lane.rank));
    predicted.delete(lane.rank);
  });
  return [...order, ...predicted.values()];
}

/** @param {Lanes} made @param {Uint32Array} by @param {Int32Array} place */
function fillSpans(made, by, place, { lane, start, duration, name, stage, micro_batch, chunk }) {
  let current = -1;
  by.forEach((old, i) => {
    const at = place[lane[old]];
    if (at !== current) made.lanes[at].from = i;
    made.start[i] = start[old];
    made.stop[i] = start[old] + duration[old];
    made.reach[i] = at === current ? Math.max(made.reach[i - 1], made.stop[i]) : made.stop[i];
    made.name[i] = name[old];
    made.stage[i] = stage[old];
    made.microBatch[i] = micro_batch[old];
    made.chunk[i] = chunk[old];
    made.lanes[at].to = i + 1;
    current = at;
  });
}

/** First span of a lane that may end after a time. @param {Lanes} made @param {Lane} lane */
export function firstVisible({ reach }, lane, time) {
  let [low, high] = [lane.from, lane.to];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reach[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The innermost span at a time, or -1. @param {Lanes} made @param {Lane} lane @param {number} slack seconds */
export function spanAt(made, lane, time, slack = 0) {
  let found = -1;
  for (let i = firstVisible(made, lane, time - slack); i < lane.to && made.start[i] <= time + slack; i++) {
    if (made.stop[i] >= time - slack) found = i;
  }
  return found;
}

/**
 * Return the ranks that wait for a rank, most waits first, from the arrows that begin at it.
 * @param {Lanes} made @returns {{rank: number, times: number}[]}
 */
export function waitersOf({ arrows }, rank) {
  const times = new Map();
  arrows.fromRank?.forEach((from, i) => {
    const to = arrows.toRank[i];
    if (from === rank && to !== rank) times.set(to, (times.get(to) ?? 0) + 1);
  });
  return [...times].map(([to, number]) => ({ rank: to, times: number })).sort((a, b) => b.times - a.times || a.rank - b.rank);
}
