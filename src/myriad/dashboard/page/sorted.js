/**
 * Binary search in ascending numbers.
 */

/** Index of the last that is at most `value`; -1: none. @param {ArrayLike<number>} sorted @param {number} value */
export function lastNotAbove(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
