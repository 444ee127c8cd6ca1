"""Measured or predicted spans over time: a lane for each rank, one time scale for all panels.

    pipeline overlap off: 412 ms
    rank 0   [F0][F1]......[ B0  ]          boxes: compute actions, with the micro-batch's number
             ▂▂▂▂▂▂                         strip: a transfer is in flight, and no action waits for it
    rank 1   ....[F0][ B0  ][F1]            dark: waiting for others; light: nothing recorded
    pipeline overlap on: 371 ms
    ...

The colour shows the action, and its lightness the stage: light for a rank's first, dark for its last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from myriad.reports.charts.svg import IDLE, INK, box, document, legend, round_step, rule, text
from myriad.telemetry.spans import Span

__all__ = ["ChartLane", "Panel", "compute_share", "draw_spans", "under_way"]

_LEFT, _WIDTH, _RIGHT, _TOP = 64.0, 900.0, 136.0, 64.0
_BAR, _STRIP, _ROW, _HEAD, _FOOT = 24.0, 5.0, 38.0, 30.0, 26.0
_NARROWEST = 0.25
"""Width in pixels below which a box is not drawn."""
_POSTED = "#8f7fc9"

_COMPUTE = {
    "forward": ((157, 195, 240), (33, 86, 158)),
    "backward": ((160, 215, 165), (28, 112, 62)),
    "backward_input": ((137, 211, 204), (15, 108, 104)),
    "backward_weight": ((250, 205, 130), (196, 110, 20)),
    "paired_forward": ((184, 186, 240), (72, 66, 158)),
    "paired_backward": ((196, 215, 140), (84, 112, 28)),
}
"""Colours of a rank's first and last stage, by span name."""
_OTHER = {
    "waiting for others": (
        "#c2410c",
        "exchange wait gather await_gather reduce await_reduce sync_tied clip tensor_comm expert_comm "
        "context_comm gather_tied reduce_tied reduce_across await_across await_momentum await_scatter",
    ),
    "optimizer": ("#a8b3c1", "step update orthogonalize"),
    "load": ("#e8c547", "load"),
    "host copy": (
        "#6d585c",
        "start_offload await_offload start_fetch await_fetch "
        "start_state_in await_state_in start_state_out await_state_out",
    ),
    "posting": (
        "#cfc6ec",
        "start_gather start_reduce start_across start_momentum start_scatter send receive release",
    ),
}
"""Colour and span names of each legend entry."""
_PARTS = {"ring_attention": ("#23407a", "ring attention")}
"""Colour and legend of each span of compute inside another."""
_COLOURS = {name: colour for colour, names in _OTHER.values() for name in names.split()}
_POSTS = {
    "start_gather": "await_gather",
    "start_reduce": "await_reduce",
    "start_across": "await_across",
    "start_momentum": "await_momentum",
    "start_scatter": "await_scatter",
    "start_offload": "await_offload",
    "start_fetch": "await_fetch",
    "start_state_in": "await_state_in",
    "start_state_out": "await_state_out",
    "receive": "wait",
}
"""The action that waits for a transfer, by the action that issues it."""


@dataclass(frozen=True)
class ChartLane:
    """The spans of one rank."""

    name: str
    spans: Sequence[Span]
    """Spans in any order, including other iterations: a wait can be in a later iteration than its
    transfer."""


@dataclass(frozen=True)
class Panel:
    """An interval of time on some ranks."""

    title: str
    start_seconds: float
    stop_seconds: float
    lanes: Sequence[ChartLane]

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.stop_seconds - self.start_seconds


def draw_spans(title: str, panels: Sequence[Panel]) -> str:
    """Draw the panels below each other, each from its own start."""
    return _Picture(title, panels).svg()


def compute_share(panel: Panel, lane: ChartLane) -> float:
    """Return the ratio of a panel's time in which a lane computed, without waits inside compute actions."""
    computed, until = 0.0, 0.0
    for span in _in_order(lane.spans):
        start, stop = _clipped(span, panel)
        if span.name in _COMPUTE:
            computed += stop - start
            until = max(until, stop)
        elif span.name in _COLOURS and start < until:
            computed -= stop - start
    return computed / panel.seconds


def under_way(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the intervals, as seconds since the epoch, in which a transfer was in flight before its wait.

    A gather that is issued again before its wait counts as the same one."""
    posted: dict[tuple[str, int], float] = {}
    receives: list[float] = []
    found = []
    for span in _in_order(spans):
        if span.name == "receive":
            receives.append(span.start_seconds)
        elif span.name in _POSTS:
            posted.setdefault((_POSTS[span.name], span.stage), span.start_seconds)
        elif span.name == "wait" and receives:
            found.append((receives.pop(0), span.start_seconds))
        elif (span.name, span.stage) in posted:
            found.append((posted.pop((span.name, span.stage)), span.start_seconds))
    return _union(found)


def _strip(lane: ChartLane) -> list[Span]:
    """Return the intervals in flight as spans without a name."""
    return [Span("", -1, -1, start, stop - start) for start, stop in under_way(lane.spans)]


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _in_order(spans: Iterable[Span]) -> list[Span]:
    """Return the spans by start, an outer span before its inner ones."""
    return sorted(spans, key=lambda span: (span.start_seconds, -span.duration_seconds))


def _clipped(span: Span, panel: Panel) -> tuple[float, float]:
    """Return the part of a span that lies in the panel; its length is 0 where none does."""
    start = min(max(span.start_seconds, panel.start_seconds), panel.stop_seconds)
    stop = min(max(span.start_seconds + span.duration_seconds, start), panel.stop_seconds)
    return start, stop


class _Picture:
    def __init__(self, title: str, panels: Sequence[Panel]) -> None:
        self.title, self.panels = title, panels
        self.seconds = max((panel.seconds for panel in panels), default=0.0) or 1.0
        self.scale = _WIDTH / self.seconds
        lanes = [(panel, lane) for panel in panels for lane in panel.lanes]
        self.names = {span.name for panel, lane in lanes for span in self._visible(panel, lane.spans)}
        self.shows_strip = any(self._visible(panel, _strip(lane)) for panel, lane in lanes)
        self.stages = {
            lane.name: sorted({span.stage for span in lane.spans if span.name in _COMPUTE})
            for panel in panels
            for lane in panel.lanes
        }

    def svg(self) -> str:
        lines, y = [text(16, 30, self.title, size=17, ink=INK, weight=600), *self._legend()], _TOP
        for panel in self.panels:
            lines += self._panel(panel, y)
            y += _HEAD + _ROW * len(panel.lanes) + _FOOT
        width, height = _LEFT + _WIDTH + _RIGHT, y + 4
        return document(width, height, self.title, lines)

    def _panel(self, panel: Panel, top: float) -> Iterator[str]:
        yield text(_LEFT, top + 18, panel.title, size=13, ink=INK, weight=600)
        top += _HEAD
        yield from self._axis(panel, top)
        for number, lane in enumerate(panel.lanes):
            yield from self._lane(panel, lane, top + _ROW * number)

    def _axis(self, panel: Panel, top: float) -> Iterator[str]:
        bottom = top + _ROW * len(panel.lanes)
        step = round_step(self.seconds / 15)
        for number in range(int(panel.seconds / step) + 1):
            x = _LEFT + number * step * self.scale
            yield rule((x, top - 4), (x, bottom))
            yield text(x, bottom + 12, f"{number * step * 1e3:g}", "middle", size=11)
        yield text(_LEFT + _WIDTH + 10, bottom + 12, "ms", size=11)

    def _lane(self, panel: Panel, lane: ChartLane, top: float) -> Iterator[str]:
        yield text(_LEFT - 8, top + 16, lane.name, "end", ink=INK)
        yield box(_LEFT, top, panel.seconds * self.scale, _BAR, IDLE)
        visible = self._visible(panel, _in_order(lane.spans))
        for draw in (self._span, self._number):
            for span in visible:
                yield from draw(panel, lane, span, top)
        for span in self._visible(panel, _strip(lane)):
            x = self._x(panel, _clipped(span, panel)[0])
            yield box(x, top + _BAR + 1, self._width(panel, span), _STRIP, _POSTED)
        words = f"computes {compute_share(panel, lane):.0%}"
        yield text(_LEFT + panel.seconds * self.scale + 8, top + 16, words)

    def _x(self, panel: Panel, seconds: float) -> float:
        return _LEFT + (seconds - panel.start_seconds) * self.scale

    def _width(self, panel: Panel, span: Span) -> float:
        start, stop = _clipped(span, panel)
        return (stop - start) * self.scale

    def _visible(self, panel: Panel, spans: Iterable[Span]) -> list[Span]:
        return [span for span in spans if self._width(panel, span) >= _NARROWEST]

    def _span(self, panel: Panel, lane: ChartLane, span: Span, top: float) -> Iterator[str]:
        x, width = self._x(panel, _clipped(span, panel)[0]), self._width(panel, span)
        if span.name in _COMPUTE:
            hint = f"{span.name} {span.stage}.{span.micro_batch}: {span.duration_seconds * 1e3:.1f} ms"
            colour, _ = self._compute_colours(lane, span)
            yield box(x, top, max(width - 0.6, _NARROWEST), _BAR, colour, hint)
        elif span.name in _PARTS:
            hint = f"step {span.chunk} of the ring: {span.duration_seconds * 1e3:.1f} ms"
            yield box(x, top, width, _BAR, _PARTS[span.name][0], hint)
        elif span.name in _COLOURS:
            yield box(x, top, width, _BAR, _COLOURS[span.name])

    def _number(self, panel: Panel, lane: ChartLane, span: Span, top: float) -> Iterator[str]:
        """Draw the micro-batch's number over the spans inside the compute action."""
        words = str(span.micro_batch)
        if span.name in _COMPUTE and self._width(panel, span) >= 6 + 6 * len(words):
            _, ink = self._compute_colours(lane, span)
            yield text(self._x(panel, _clipped(span, panel)[0]) + 3, top + 11, words, size=10, ink=ink)

    def _compute_colours(self, lane: ChartLane, span: Span) -> tuple[str, str]:
        """Return the colour of the box, and of a number on it."""
        stages = self.stages[lane.name]
        depth = stages.index(span.stage) / (len(stages) - 1) if len(stages) > 1 else 0.25
        light, dark = _COMPUTE[span.name]
        red, green, blue = (round(a + (b - a) * depth) for a, b in zip(light, dark, strict=True))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
        return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if is_dark else INK

    def _legend(self) -> Iterator[str]:
        entries = [
            (f"rgb{_middle(*_COMPUTE[name])}", name.replace("_", ", ", 1))
            for name in _COMPUTE
            if name in self.names
        ]
        entries += [entry for name, entry in _PARTS.items() if name in self.names]
        entries += [
            (colour, words) for words, (colour, names) in _OTHER.items() if self.names & {*names.split()}
        ]
        if self.shows_strip:
            entries.append((_POSTED, "in flight, not waited for"))
        yield from legend(entries, _LEFT, 44)


def _middle(light: tuple[int, int, int], dark: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple((3 * a + b) // 4 for a, b in zip(light, dark, strict=True))
