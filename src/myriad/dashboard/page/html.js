/** What every view is written with. Text in a template is text: Preact escapes it. */

import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export { useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);
