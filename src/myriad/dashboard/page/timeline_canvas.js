/**
 * The timeline's canvas and its mouse and keyboard handlers. Dragging and zooming change only what is drawn from the
 * spans that are here; the view asks for others when those do not suffice.
 */

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { spanAt } from "./lanes.js";
import { AXIS, GUTTER, laneGeometry, laneUnder, TimelinePaint } from "./timeline_paint.js";

const LONGEST_ZOOM = 32;
const SHORTEST_SECONDS = 1e-6;
const CLICK_PIXELS = 4;

/**
 * @param {object} props
 * @param {import("./lanes.js").Lanes} props.data
 * @param {import("./timeline_paint.js").Viewport} props.viewport changed in place; a new one is shown as it is
 * @param {(viewport: import("./timeline_paint.js").Viewport) => void} props.onViewport after it changed
 * @param {number} props.selected rank @param {(rank: number) => void} props.onSelect @param {(rank: number) => void} props.onOpen
 * @param {{width: number, height: number}} props.size
 * @param {{theme: import("./colours.js").Theme, arrows: boolean, clockError: number}} props.options
 * @param {(lane: import("./lanes.js").Lane, span: number) => string[]} props.describe
 */
export function TimelineCanvas(props) {
  const { data, viewport, onViewport, selected, onSelect, onOpen, size, options, describe } = props;
  const box = useRef(null);
  const canvas = useRef(null);
  const [hover, setHover] = useState(null);
  const [spoken, setSpoken] = useState("");
  const [zoom, setZoom] = useState(viewport.zoom);
  const room = size.height - AXIS;
  const predicted = data.lanes.length - data.laneOf.size;
  const geometry = useMemo(() => laneGeometry(data.lanes, room, zoom), [data, room, zoom]);

  // What handlers and frames read: always the newest.
  const now = useRef(null);
  now.current = { ...now.current, data, viewport, geometry, selected, options, room, size };
  const draw = () => {
    const it = now.current;
    if (it.pending) return;
    it.pending = requestAnimationFrame(() => {
      const at = now.current;
      at.pending = 0;
      at.viewport.top = Math.max(0, Math.min(at.viewport.top, at.geometry.total - at.room));
      at.paint.draw(at.data, at.geometry, at.viewport, { ...at.options, selected: at.selected });
      performance.mark("myriad:timeline");
    });
  };
  useLayoutEffect(() => {
    now.current.paint ??= new TimelinePaint(canvas.current);
    now.current.paint.resize(size.width, size.height, devicePixelRatio || 1);
    draw();
  }, [size.width, size.height]);
  useLayoutEffect(draw, [data, viewport, geometry, selected, options.theme, options.arrows, options.clockError]);
  useEffect(() => () => cancelAnimationFrame(now.current.pending), []);

  const changed = () => {
    draw();
    onViewport(now.current.viewport);
  };
  const pan = (pixels) => {
    const { viewport: at, size: area } = now.current;
    const by = (pixels / (area.width - GUTTER)) * (at.end - at.start);
    at.start += by;
    at.end += by;
    changed();
  };
  const zoomTime = (factor, x) => {
    const { viewport: at, size: area } = now.current;
    const share = Math.max(0, Math.min(1, (x - GUTTER) / (area.width - GUTTER)));
    const length = Math.max(SHORTEST_SECONDS, (at.end - at.start) * factor);
    const fixed = at.start + (at.end - at.start) * share;
    at.start = fixed - length * share;
    at.end = at.start + length;
    changed();
  };
  const zoomLanes = (factor, y) => {
    const { viewport: at } = now.current;
    const next = Math.max(1, Math.min(LONGEST_ZOOM, at.zoom * factor));
    at.top = (at.top + y) * (next / at.zoom) - y;
    at.zoom = next;
    setZoom(next);
    changed();
  };
  useWheel(box, { pan, zoomTime, zoomLanes });

  const drag = useRef(null);
  const under = (event) => {
    const { left, top } = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const lane = laneUnder(geometry, y - AXIS + viewport.top);
    if (lane < 0 || y < AXIS) return { lane: -1, span: -1, x, y };
    const second = (viewport.end - viewport.start) / (size.width - GUTTER);
    const span = x < GUTTER ? -1 : spanAt(data, data.lanes[lane], viewport.start + (x - GUTTER) * second, second);
    return { lane, span, x, y };
  };
  const follow = (event) => {
    const held = drag.current;
    if (!held) return setHover(under(event));
    held.moved += Math.abs(event.clientX - held.x) + Math.abs(event.clientY - held.y);
    if (held.moved < CLICK_PIXELS) return;
    viewport.top += held.y - event.clientY;
    const by = held.x - event.clientX;
    [held.x, held.y] = [event.clientX, event.clientY];
    if (hover) setHover(null);
    pan(by);
  };
  const end = (event) => {
    const held = drag.current;
    drag.current = null;
    const { lane } = under(event);
    if (held && held.moved < CLICK_PIXELS && lane >= 0) onSelect(data.lanes[lane].rank);
  };
  const step = (by) => {
    const from = data.laneOf.get(selected) ?? -by;
    let to = from + by;
    while (data.lanes[to]?.predicted) to += by;
    const lane = data.lanes[to];
    if (!lane) return;
    if (geometry.tops[to] < viewport.top) viewport.top = geometry.tops[to];
    if (geometry.tops[to] + geometry.heights[to] > viewport.top + room) viewport.top = geometry.tops[to] + geometry.heights[to] - room;
    onSelect(lane.rank);
    setSpoken(describe(lane, -1).join(", "));
  };
  const onKey = (event) => {
    const middle = (GUTTER + size.width) / 2;
    const keys = {
      ArrowLeft: () => pan(-size.width / 10),
      ArrowRight: () => pan(size.width / 10),
      ArrowUp: () => step(-1),
      ArrowDown: () => step(1),
      "+": () => zoomTime(0.7, middle),
      "=": () => zoomTime(0.7, middle),
      "-": () => zoomTime(1 / 0.7, middle),
      "]": () => zoomLanes(1.4, room / 2),
      "[": () => zoomLanes(1 / 1.4, room / 2),
      Enter: () => selected >= 0 && onOpen(selected),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  };

  return html`
    <div class="lanes" ref=${box} tabindex="0" role="application" aria-roledescription="timeline" onKeyDown=${onKey}
      aria-label="Timeline of ${data.lanes.length} lanes${predicted ? `, ${predicted} of them predicted` : ""}" aria-describedby="lane-keys">
      <canvas ref=${canvas} onPointerMove=${follow} onPointerLeave=${() => setHover(null)} onPointerUp=${end}
        onPointerDown=${(event) => {
          drag.current = { x: event.clientX, y: event.clientY, moved: 0 };
          event.target.setPointerCapture(event.pointerId);
        }} onPointerCancel=${() => (drag.current = null)} onDblClick=${(event) => zoomTime(0.4, under(event).x)}></canvas>
      ${hover?.lane >= 0 && html`<${Tip} ...${hover} width=${size.width} lines=${describe(data.lanes[hover.lane], hover.span)} />`}
      <p class="unseen" id="lane-keys">Left and right pan, plus and minus zoom time, brackets zoom lanes, up and down choose a rank, Enter opens it.</p>
      <p class="unseen" aria-live="polite">${spoken}</p>
    </div>`;
}

/** Wheel: zoom time; with Shift: lanes; sideways: pan. */
function useWheel(box, { pan, zoomTime, zoomLanes }) {
  const handlers = useRef(null);
  handlers.current = { pan, zoomTime, zoomLanes };
  useEffect(() => {
    const element = box.current;
    const turn = (event) => {
      event.preventDefault();
      const { left, top } = element.getBoundingClientRect();
      const to = handlers.current;
      if (event.shiftKey) to.zoomLanes(Math.exp(-(event.deltaY || event.deltaX) / 500), event.clientY - top - AXIS);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) to.pan(event.deltaX);
      else to.zoomTime(Math.exp(event.deltaY / 500), event.clientX - left);
    };
    element.addEventListener("wheel", turn, { passive: false });
    return () => element.removeEventListener("wheel", turn);
  }, []);
}

function Tip({ x, y, width, lines }) {
  const style = { top: `${y + 14}px`, left: x > width - 260 ? "auto" : `${x + 12}px`, right: x > width - 260 ? `${width - x + 8}px` : "auto" };
  return html`<div class="tip" style=${style}>${lines.map((line, i) => (i ? html`<div>${line}</div>` : html`<b>${line}</b>`))}</div>`;
}
