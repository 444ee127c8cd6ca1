/** Light or dark theme: the system's, unless one was selected. */

import { useEffect, useLayoutEffect, useState } from "./html.js";

const system = matchMedia("(prefers-color-scheme: dark)");

/** The selected theme. A browser without storage (blocked site data) has the choice for this visit only. */
const choice = {
  now: /** @type {string | null} */ (null),
  get() {
    try {
      return localStorage.getItem("theme");
    } catch {
      return this.now;
    }
  },
  set(theme) {
    this.now = theme;
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // Storage is blocked: see above.
    }
  },
};

/** @returns {import("./colours.js").Theme} */
const current = () => {
  const chosen = choice.get();
  return chosen === "light" || chosen === "dark" ? chosen : system.matches ? "dark" : "light";
};

/** @returns {[import("./colours.js").Theme, () => void]} the theme, and what changes it */
export function useTheme() {
  const [theme, setTheme] = useState(current);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  useEffect(() => {
    const follow = () => setTheme(current());
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  const change = () => {
    choice.set(theme === "dark" ? "light" : "dark");
    setTheme(current());
  };
  return [theme, change];
}

/** Size of an element's inside, as it changes. @param {{current: HTMLElement | null}} ref */
export function useSize(ref) {
  const [size, setSize] = useState({ width: 0, height: 0 });
  useLayoutEffect(() => {
    const measure = () => {
      const { clientWidth: width, clientHeight: height } = ref.current;
      setSize((before) => (before.width === width && before.height === height ? before : { width, height }));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return size;
}
