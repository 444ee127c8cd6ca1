"""Frames of ``myriad top``: a run while it trains, and with ``--nodes`` its machines."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from myriad.dashboard.node_measurements import gpu_sentence
from myriad.reports.charts.colours import COLOURS, USEFUL
from myriad.run.event_text import event_text
from myriad.run.run_lines import loss_scale_text, missing_lines_text
from myriad.units import format_bytes, format_count, format_flops, format_number, format_ranks, format_seconds

if TYPE_CHECKING:
    from myriad.dashboard.insight.findings import SpanAnalysis
    from myriad.dashboard.insight.losses import Losses
    from myriad.dashboard.insight.straggler_report import Straggler
    from myriad.dashboard.run_view import RunView
    from myriad.run import Run
    from myriad.system.jsonl import Record

__all__ = ["frame", "show_nodes"]

_MOST_SLOW, _MOST_EVENTS, _MOST_SILENT = 8, 6, 8
_WIDEST_BAR = 100
_STATE_STYLE = {"hangs": "bold red", "failed": "bold red", "interrupted": "bold yellow"}


def frame(view: "RunView", ranks: Sequence[int], width: int) -> RenderableType:
    """Return a frame. ``ranks``: those of ``--without``."""
    parts: list[RenderableType] = [
        Text(f"{view.run.path.resolve().name}: {view.sentence}", style=_STATE_STYLE.get(view.state, "bold")),
        Text(" · ".join(_figures(view)), style="dim"),
    ]
    if devices := gpu_sentence(view.gpus):
        parts.append(Text(devices, style="dim"))
    found = view.findings
    if found.losses is None:
        parts += [Text(), Text("no spans yet: RUN/spans has no whole file of them", style="dim")]
    else:
        parts += [Text(), *_losses(found.losses, width)]
        parts += [Text(), *_slow(found)]
        parts += list(_path(found))
    if ranks:
        answer = found.without(ranks)
        parts.append(Text("no step's spans fit its program" if answer is None else answer.sentence))
    if view.state == "hangs":
        parts += [Text(), *_waiting(found)]
    parts += [Text(), *_events(view.events), Text(_span_coverage(view), style="dim")]
    return Group(*parts)


def _figures(view: "RunView") -> Iterator[str]:
    if view.loss is not None:
        yield f"loss {view.loss:.4f}"
    if view.metrics and (scale := loss_scale_text(view.metrics[-1], view.num_overflows)):
        yield scale
    if (speed := view.tokens_per_second) is not None:
        yield f"{format_count(speed)} tokens/s"
    if (mfu := view.mfu) is not None:
        peak = f" of {format_flops(view.peak_flops)}" if view.peak_flops else ""
        source = f" ({view.peaks.source})" if view.peaks.source else ""
        yield f"MFU {mfu:.1%}{peak}{source}"
    layout = view.job.layout
    axes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "pp", "tp"))
    yield f"{layout.world} rank{'' if layout.world == 1 else 's'}: {axes}"


def _losses(losses: "Losses", width: int) -> Iterator[RenderableType]:
    """Return a bar of the step and the legend of its parts."""
    useful = losses.mfu if losses.mfu is not None else losses.compute_seconds / losses.step_seconds
    first = "MFU" if losses.mfu is not None else "computes"
    parts = [(first, useful, USEFUL)]
    parts += [(name, share, COLOURS[name]) for name, share in losses.shares.items() if share >= 0.0005]
    yield _bar(parts, min(width - 2, _WIDEST_BAR))
    legend = Text()
    for name, share, colour in parts:
        legend.append("■ ", style=colour).append(f"{name} ").append(f"{share:.1%}", style="bold").append(
            "   "
        )
    yield legend
    if not losses.split and losses.shares["bubble"] > 0:
        yield Text("bubble includes messages: the spans do not match the program", style="dim")


def _bar(parts: Sequence[tuple[str, float, str]], width: int) -> Text:
    """Return a bar of whole characters whose rounded parts always add up to its width."""
    bar, done, shown = Text(), 0.0, 0
    whole = sum(max(0.0, share) for _, share, _ in parts) or 1.0
    for _, share, colour in parts:
        done += max(0.0, share) / whole
        count = round(done * width) - shown
        bar.append("█" * count, style=colour)
        shown += count
    return bar


def _slow(found: "SpanAnalysis") -> Iterator[RenderableType]:
    slow = found.suspects
    if not slow:
        yield Text("no rank is slower than its peers", style="dim")
    else:
        yield _slow_table(slow)
    for rank in found.drifting[:2]:
        yield Text(found.drift.sentence(rank))


def _slow_table(slow: "Sequence[Straggler]") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("slow", "stage", "phase", "by", "z", "ms a step", "peers", "since step"):
        table.add_column(heading, justify="left" if heading in ("slow", "phase") else "right")
    for one in slow[:_MOST_SLOW]:
        who = f"node {one.node}" if one.culprit == "node" else f"rank {one.ranks[0]} (node {one.node})"
        table.add_row(
            who,
            "-" if one.stage < 0 else str(one.stage),
            one.phase,
            f"{one.ratio - 1:+.0%}",
            f"{one.z:.1f}",
            f"{one.seconds * 1e3:.1f}",
            f"{one.peers_seconds * 1e3:.1f}",
            "-" if one.since_step is None else str(one.since_step),
        )
    if len(slow) > _MOST_SLOW:
        table.add_row(f"and {len(slow) - _MOST_SLOW} more")
    return table


def _path(found: "SpanAnalysis") -> Iterator[RenderableType]:
    path = found.path
    if path is None or not path.seconds:
        return
    classes = sorted(path.by_class().items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds / path.seconds:.0%}" for name, seconds in classes if seconds > 0)
    rank, seconds = next(iter(path.by_rank().items()))
    most = f"rank {rank} {seconds / path.seconds:.0%}"
    yield Text(f"critical path of step {found.path_step}: {shares}; {most} of it")


def _waiting(found: "SpanAnalysis") -> Iterator[RenderableType]:
    stuck = found.hang
    if stuck is None:
        yield Text("no wait analysis: the spans do not match the program", style="dim")
        return
    for rank in stuck.silent[:_MOST_SILENT]:
        action = stuck.action(rank)
        where = f"rank {rank} on node {found.ranks.node[rank]}"
        doing = "between two steps" if action is None else f"in {action}"
        yield Text(f"silent: {where}, {doing}; {stuck.waited_for_by[rank]} wait for it", style="red")


def _events(events: "Sequence[Record]") -> Iterator[RenderableType]:
    for event in events[-_MOST_EVENTS:]:
        line = Text(f"{_clock(event.get('time'))} ", style="dim", no_wrap=True, overflow="ellipsis")
        step = event.get("step")
        where = f"step {step}: " if isinstance(step, int) and not isinstance(step, bool) else ""
        name = str(event.get("event")).replace("_", " ")
        yield line.append(f"{name} ", style="default").append(f"{where}{event_text(event)}", style="dim")


def _clock(at: object) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else "-"
    except (OverflowError, ValueError, OSError):  # The year is outside of the calendar.
        return "-"


def _span_coverage(view: "RunView") -> str:
    spans, steps = view.spans, view.findings.whole_steps
    covered = f"spans of attempt {spans.attempt}, no whole step yet"
    if len(steps):
        covered = f"spans of attempt {spans.attempt}, steps {steps[0]} to {steps[-1]}"
    parts = [covered, f"clocks agree to {format_number(spans.clock_error_seconds * 1e3, 2)} ms"]
    if spans.num_dropped:
        parts.append(f"{spans.num_dropped:,} were dropped")
    if spans.num_unreadable:
        parts.append(f"{spans.num_unreadable} files cannot be read")
    if not len(spans.records):
        parts = []
    if missing := missing_lines_text(view.steps.without_line):
        parts.append(missing)
    if view.num_wrong_lines:
        parts.append(f"{view.num_wrong_lines} lines of metrics.jsonl and events.jsonl are wrong")
    return " · ".join(parts)


_MOST_ROWS, _MOST_KINDS = 64, 8
_WELL = "no complaint"


def show_nodes(run: "Run", *, once: bool, every: float, as_json: bool) -> None:
    """Print a frame, or one each ``every`` seconds until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from myriad.dashboard.node_measurements import NodeCounters
    from myriad.dashboard.node_table import evidence_rows, health_of, node_rows, read_facts

    counters = NodeCounters(run.counters_path)

    def rows() -> list[dict[str, Any]]:
        health = health_of(run.read_events())
        return node_rows(read_facts(run.nodes_path), counters.newest(), health, time.time())

    if as_json:
        kept = [dict(one) for one in evidence_rows(run.counters_path / "around")]
        typer.echo(json.dumps({"run": str(run.path), "nodes": rows(), "evidence": kept}))
        return
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_nodes_frame(rows()))
        return
    with Live(_nodes_frame(rows()), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(_nodes_frame(rows()), refresh=True)
        except KeyboardInterrupt:
            return


def _nodes_frame(rows: Sequence[Mapping[str, Any]]) -> Group:
    """Return the table of nodes, unhealthy ones first, and the hardware of the machines."""
    if not rows:
        return Group(Text("no node has reported what it is made of yet", style="dim"))
    alike: dict[str, list[int]] = {}
    for row in rows:
        alike.setdefault(_made_of(row), []).append(row["node"])
    lines = [
        Text(f"{format_ranks(nodes).replace('rank', 'node')}: {text}", style="dim")
        for text, nodes in alike.items()
    ]
    return Group(_nodes_table(rows), Text(), *lines[:_MOST_KINDS])


def _nodes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table without columns that are empty for all nodes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    cells = [_cells(row) for row in sorted(rows, key=lambda row: row["health"] == _WELL)[:_MOST_ROWS]]
    headings = [one for one in cells[0] if any(cell[one] for cell in cells)]
    for heading in headings:
        number = heading in ("heartbeat", "sent/s", "received/s", "RDMA/s", "again/s")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading != "health")
    for cell in cells:
        style = "" if cell["health"] == _WELL else "red"
        table.add_row(*(Text(cell[heading]) for heading in headings), style=style)
    if len(rows) > _MOST_ROWS:
        table.add_row(f"and {len(rows) - _MOST_ROWS:,} more: --json has all")
    return table


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    ago, again, rdma = (
        row[key] for key in ("heartbeat_seconds_ago", "sent_again_per_second", "rdma_bytes_per_second")
    )
    return {
        "node": str(row["node"]),
        "heartbeat": "-" if ago is None else f"{format_seconds(ago)} ago",
        "host": row["host"],
        "address": row["address"],
        "pod": row["pod"] if row["pod"] != row["host"] else "",
        "sent/s": format_bytes(row["sent_bytes_per_second"]),
        "received/s": format_bytes(row["received_bytes_per_second"]),
        "RDMA/s": format_bytes(rdma) if rdma else "",
        "again/s": f"{again:.0f}" if again else "",
        "health": row["health"],
    }


def _made_of(row: Mapping[str, Any]) -> str:
    """Return the hardware without serial numbers, which are in --json and on the page."""
    versions = [f"{name} {text}" for name, text in row["versions"].items()]
    return "; ".join(filter(None, [row["gpus"], row["cpu"], *row["nics"], ", ".join(versions)])) or "unknown"
