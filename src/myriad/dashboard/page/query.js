/** A request of a view, repeated when its key or the run changes. */

import { useEffect, useLayoutEffect, useRef, useState } from "./html.js";

/**
 * One request at a time, then the newest that became due meanwhile: dragging through time requests as often as
 * the server answers, and shows every answer. The value of before stays until the next is there.
 *
 * @template T
 * @param {string} key identifies the request; "" sends none
 * @param {() => Promise<T>} request
 * @param {any} version of what the server has
 * @returns {{value: T | undefined, key: string, error: Error | undefined, busy: boolean}}
 */
export function useAnswer(key, request, version) {
  const [answer, setAnswer] = useState({ value: undefined, key: "", error: undefined, busy: true });
  const state = useRef({ wanted: "", flying: false, request, alive: true });
  state.current.request = request;

  async function fly() {
    const now = state.current;
    now.flying = true;
    while (now.alive && now.wanted) {
      const [asked, question] = [now.wanted, now.wanted.slice(now.wanted.indexOf("|") + 1)];
      let outcome;
      try {
        outcome = { value: await now.request(), error: undefined };
      } catch (problem) {
        outcome = { error: problem };
      }
      if (now.wanted === asked) now.wanted = "";
      if (now.alive) setAnswer((before) => ({ ...before, ...outcome, key: question, busy: Boolean(now.wanted) }));
    }
    now.flying = false;
  }

  // Not after the next frame: the answer is what people wait for.
  useLayoutEffect(() => {
    if (!key) return;
    state.current.wanted = `${version}|${key}`;
    if (!state.current.flying) fly();
  }, [key, version]);
  useEffect(() => {
    state.current.alive = true;
    return () => {
      state.current.alive = false;
    };
  }, []);
  return answer;
}
