"""The report's section on the newest steps' spans: the seconds of a step by cause, and the slow ranks, as
self-contained HTML."""

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from myriad.reports.charts.colours import COLOURS, MEANING, USEFUL
from myriad.reports.charts.svg import box, text
from myriad.reports.run_report.report_page import html_table
from myriad.units import format_flops, format_number

if TYPE_CHECKING:
    from myriad.dashboard.insight.critical_path import CriticalPath
    from myriad.dashboard.insight.findings import SpanAnalysis
    from myriad.dashboard.insight.losses import Losses
    from myriad.dashboard.run_view import RunView

__all__ = ["span_parts"]

_WIDTH, _ROW, _LEFT, _RIGHT = 1000.0, 22.0, 150.0, 150.0
_LEAST_SHARE = 0.0005
_MOST_PHASES, _MOST_SLOW, _MOST_RANKS_TOLD = 8, 20, 5
_Z_FULL = 8.0
"""The z-score with the strongest colour."""
_INHERIT = "currentColor"
"""Colour of the page's text: the bars have no background of their own."""
_SLOWER, _QUICKER, _ALIKE, _UNKNOWN = (196, 78, 12), (33, 102, 172), (232, 236, 240), (255, 255, 255, 0)


def span_parts(
    view: "RunView", predicted: "Losses | None" = None, without: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the section. ``without``: ranks to leave out in a comparison; empty: the slowest."""
    found = view.findings
    losses = found.losses
    if losses is None:
        yield from _no_spans(view)
        return
    steps = found.whole_steps
    yield "<h2>Where a step's time goes</h2>"
    yield f'<p class="dim">{escape(_of_what(view, losses, len(steps)))}</p>'
    yield f'<div class="card scroll">{_waterfall(losses, predicted)}{_loss_table(losses, predicted)}</div>'
    if found.path is not None:
        yield from _path(found, found.path)
    yield from _ranks(view, without)


def _no_spans(view: "RunView") -> Iterator[str]:
    if view.spans.num_unreadable:
        yield "<h2>Where a step's time goes</h2>"
        yield f'<p class="dim">{view.spans.num_unreadable} files of spans cannot be read</p>'


def _of_what(view: "RunView", losses: "Losses", count: int) -> str:
    steps, spans = view.findings.whole_steps, view.spans
    which = f"steps {steps[0]} to {steps[-1]}" if count > 1 else f"step {steps[0]}"
    text = f"{format_number(losses.step_seconds, 4)} s a step"
    if view.speed is not None:
        text += f", mean of steps {view.speed.first_step} to {view.speed.last_step}"
    text += f"; divided as in the spans of all ranks in {which}"
    if view.peak_flops:
        text += f"; peak {format_flops(view.peak_flops)} of all ranks"
        text += f" ({view.peaks.source})" if view.peaks.source else ""
    if spans.num_dropped:
        text += f"; {spans.num_dropped:,} spans were dropped"
    if not losses.split:
        text += "; bubble includes messages: the spans do not match the program"
    return text


def _rows(losses: "Losses") -> list[tuple[str, float, float, str]]:
    """Return name, start of the bar, share and colour of each row; the last row is the remainder."""
    rows, left = [], 1.0
    for name, share in losses.shares.items():
        if abs(share) >= _LEAST_SHARE:
            rows.append((name, left - max(share, 0.0), share, COLOURS[name]))
        left -= share
    useful = "MFU" if losses.mfu is not None else "computes"
    return [*rows, (useful, 0.0, left, USEFUL)]


def _waterfall(losses: "Losses", predicted: "Losses | None") -> str:
    rows = _rows(losses)
    expected = {} if predicted is None else {row[0]: row for row in _rows(predicted)}
    # A negative loss extends beyond 1.
    widest = max(1.0, *(begin + abs(share) for _, begin, share, _ in rows))
    scale, parts = (_WIDTH - _LEFT - _RIGHT) / widest, []
    whole = "peak" if losses.mfu is not None else "the step"
    parts += [_bar(0, 0.0, 1.0, "#9aa3ad", scale), _label(0, f"100% of {whole}", "")]
    for at, (name, begin, share, colour) in enumerate(rows, 1):
        parts.append(_bar(at, begin, share, colour, scale, f"{name}: {share:.2%}"))
        label = f"{share:.1%}"
        if name in expected:
            _, start, part, _ = expected[name]
            x, width = _LEFT + start * scale, max(part * scale, 1.0)
            y = at * _ROW + _ROW - 5
            parts.append(box(x, y, width, 3, _INHERIT))
            label += f" (plan {part:.1%})"
        parts.append(_label(at, name, label))
    height = _ROW * (len(rows) + 1) + 4
    head = f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" font-size="13" fill="currentColor" '
    head += 'aria-label="from the peak down to what was reached">'
    return head + "".join(parts) + "</svg>"


def _bar(at: int, begin: float, share: float, colour: str, scale: float, hint: str = "") -> str:
    x, width = _LEFT + max(0.0, begin) * scale, max(abs(share) * scale, 0.5)
    return box(x, at * _ROW + 3, width, _ROW - 8, colour, hint)


def _label(at: int, name: str, value: str) -> str:
    y = at * _ROW + 15
    right = text(_WIDTH - _RIGHT + 8, y, value, size=13, ink=_INHERIT)
    return text(_LEFT - 8, y, name, "end", size=13, ink=_INHERIT) + right


def _loss_table(losses: "Losses", predicted: "Losses | None") -> str:
    plan = predicted is not None
    headings = ["loss", "of the peak", "a step", *(["planned", "more than planned"] if plan else []), ""]
    rows = []
    for name, share in losses.shares.items():
        seconds = losses.seconds[name]
        if not seconds and not (predicted and predicted.seconds[name]):
            continue
        cells = [
            f'<i style="background:{COLOURS[name]}"></i>{name}',
            f"{share:.2%}",
            f"{seconds * 1e3:,.2f} ms",
        ]
        if predicted is not None:
            expected = predicted.seconds[name]
            cells += [f"{expected * 1e3:,.2f} ms", f"{(seconds - expected) * 1e3:+,.2f} ms"]
        rows.append([*cells, MEANING[name]])
    if losses.mfu is not None and losses.ideal_seconds is not None:
        ideal = losses.ideal_seconds
        cells = [f'<i style="background:{USEFUL}"></i>MFU', f"{losses.mfu:.2%}", f"{ideal * 1e3:,.2f} ms"]
        if predicted is not None and predicted.ideal_seconds is not None:
            more = ideal - predicted.ideal_seconds
            cells += [f"{predicted.ideal_seconds * 1e3:,.2f} ms", f"{more * 1e3:+,.2f} ms"]
        rows.append([*cells, "the model's FLOPs at the peak"])
    return html_table(headings, rows, range(1, 5 if plan else 3))


def _path(found: "SpanAnalysis", path: "CriticalPath") -> Iterator[str]:
    yield "<h2>Critical path of a step</h2>"
    yield f'<p class="dim">the critical path of step {found.path_step}: '
    yield f"{format_number(path.seconds, 4)} s in "
    yield f"{len(path.links)} links, from its end back to its begin, over {len(path.by_rank())} ranks</p>"
    classes = sorted(path.by_class().items(), key=lambda item: -item[1])
    rows = [[name, f"{s * 1e3:,.2f} ms", f"{s / path.seconds:.1%}"] for name, s in classes if s > 0]
    ranks = [
        [f"rank {rank}", f"{s * 1e3:,.2f} ms", f"{s / path.seconds:.1%}"]
        for rank, s in list(path.by_rank().items())[:_MOST_RANKS_TOLD]
    ]
    yield '<div class="charts">'
    for headings, cells in ((["class", "time", "share"], rows), (["rank", "", "share"], ranks)):
        yield f'<div class="card">{html_table(headings, cells, (1, 2))}</div>'
    yield "</div>"


def _ranks(view: "RunView", without: Sequence[int]) -> Iterator[str]:
    found = view.findings
    yield "<h2>Ranks</h2>"
    slow = found.stragglers[:_MOST_SLOW]
    sentences = [one.sentence for one in slow] or ["no rank is slower than its peers"]
    sentences += [found.drift.sentence(rank) for rank in found.drifting[:_MOST_RANKS_TOLD]]
    asked = without or (slow[0].ranks if slow else ())
    if asked and (answer := found.without(asked)) is not None:
        sentences.append(answer.sentence)
    stuck = found.hang
    if view.state == "hangs" and stuck is not None:
        sentences.insert(0, stuck.sentence)
    yield "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    yield from _heat(found)


def _heat(found: "SpanAnalysis") -> Iterator[str]:
    """Return a heat map of the ranks for each phase, coloured by their distance from their peers."""
    from myriad.telemetry.stragglers import PHASE_NOISE_SECONDS, compare

    phases = _largest_phases(found)
    width = _columns(found.ranks.world, found.ranks.node_size)
    yield '<p class="dim">Each cell is a rank, in order, from the left and then down, '
    yield f"{width} in a row; orange takes longer than its peers, blue less, white is not known.</p>"
    yield '<div class="charts">'
    for phase in phases:
        seconds = found.steady.of_phase(phase)
        scores = compare(seconds, found.ranks.peers, noise_seconds=PHASE_NOISE_SECONDS)
        known = scores.seconds[~np.isnan(scores.seconds)]
        caption = (
            f"{phase}: {format_number(float(np.median(known)) * 1e3)} ms a step" if len(known) else phase
        )
        uri = _data_uri(_pixels(scores.z, width))
        style = "width:100%;image-rendering:pixelated;border-radius:4px"
        image = f'<img alt="{escape(phase)} by rank" style="{style}" src="{uri}">'
        yield f'<div class="card"><p>{escape(caption)}</p>{image}</div>'
    yield "</div>"


def _largest_phases(found: "SpanAnalysis") -> list[str]:
    steady = found.steady
    spent = np.where(steady.seen[:, :, None], steady.own_seconds, 0.0).sum(axis=(0, 1))
    order = np.argsort(-spent)
    return [steady.phases[at] for at in order[:_MOST_PHASES] if spent[at] >= _LEAST_SHARE * spent.sum()]


def _columns(world: int, node_size: int) -> int:
    """Return the columns of the heat map: whole nodes in a row, and about six times as many columns as
    rows."""
    wanted = max(1.0, (6 * world) ** 0.5)
    nodes = max(1, round(wanted / node_size))
    return min(world, nodes * node_size)


def _pixels(z: Any, width: int) -> Any:
    """Return the pixels ``[row, column, colour]``."""
    height = -(-len(z) // width)
    padded = np.full(height * width, np.nan)
    padded[: len(z)] = z
    strength = np.clip(np.abs(padded) / _Z_FULL, 0, 1)[:, None]
    towards = np.where((padded > 0)[:, None], np.array(_SLOWER), np.array(_QUICKER))
    mixed = np.nan_to_num(np.array(_ALIKE) * (1 - strength) + towards * strength)
    pixels = np.empty((height * width, 4), dtype=np.uint8)
    pixels[:, :3], pixels[:, 3] = mixed, 255
    pixels[np.isnan(padded)] = _UNKNOWN
    return pixels.reshape(height, width, 4)


def _data_uri(pixels: npt.NDArray[Any]) -> str:
    """Encode ``[row, column, red green blue alpha]`` of uint8 as a PNG."""
    height, width = pixels.shape[:2]
    rows = np.zeros((height, 1 + 4 * width), dtype=np.uint8)  # Each row starts with a filter byte of 0.
    rows[:, 1:] = pixels.reshape(height, 4 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)
    return "data:image/png;base64," + b64encode(data).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
