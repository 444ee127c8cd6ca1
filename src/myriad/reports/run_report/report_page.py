"""The HTML report of a run: one self-contained page without scripts, links or external fonts."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from time import strftime

from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.reports.charts.ledger_chart import COLOURS, ledger_bar
from myriad.reports.charts.loss_chart import spark_svg
from myriad.reports.charts.metric_charts import MetricCharts
from myriad.reports.run_report.run_facts import (
    ATTEMPT_HEADINGS,
    FAULT_HEADINGS,
    MEANING,
    Facts,
    at_clock,
    attempt_cells,
    fault_cells,
)
from myriad.run.score_history import ScoreHistory, score_histories
from myriad.system.jsonl import Record
from myriad.system.whole_file import read_text
from myriad.units import format_bytes, format_count, format_number, format_seconds

__all__ = ["html_table", "page"]

_MOST_FAULTS = 500
_MOST_SCORES = 500
_MOST_POINTS = 3000
"""Largest number of points of a curve: a million steps would make a page of a hundred megabytes."""
_LARGE_CHARTS, _MOST_FEW_POINTS, _MOST_CHARTS = ("loss", "step_seconds"), 800, 40

_STYLE = """
:root { --ink: #16202c; --dim: #66717f; --line: #e3e7ec; --paper: #f6f7f9; --card: #fff; --accent: #1f5fa8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --dim: #98a3b2; --line: #2b3440; --paper: #10151b; --card: #1a2129 }
  :root { --accent: #7fb0e6 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 26px; margin: 0 }
h2 { font-size: 17px; margin: 36px 0 10px }
p { margin: 4px 0 }
.dim { color: var(--dim) }
.state { font-size: 13px; padding: 2px 10px; border-radius: 12px; background: var(--accent) }
.state { color: var(--card); vertical-align: 4px; margin-left: 8px }
.tiles, .charts { display: grid; gap: 12px }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-top: 20px }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)) }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.tile, .card { padding: 12px 14px }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums }
.tile span { color: var(--dim); font-size: 13px }
h1, td, pre, .dim { unicode-bidi: isolate }
svg { display: block; width: 100%; height: auto; border-radius: 6px }
td svg { width: 220px }
.bar { margin-bottom: 10px }
.bar svg { height: 34px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }
th { text-align: left; color: var(--dim); font-weight: 500 }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap }
tr:last-child td { border-bottom: 0 }
h3 { font-size: 15px; margin: 22px 0 4px }
.drawn { margin: 8px 0 12px }
.drawn svg { max-width: 880px; margin: 0 auto }
.whole { white-space: nowrap }
.chart .paper { fill: none }
.chart .ink { fill: var(--ink) }
.chart .soft { fill: var(--dim) }
.chart .grid { stroke: var(--line) }
i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px }
pre { overflow-x: auto; font-size: 13px }
summary { cursor: pointer; color: var(--dim); margin-top: 8px }
"""


def page(facts: Facts, spans: Iterable[str] = ()) -> str:
    """Return the whole page; ``spans``: the sections on the newest steps, as HTML."""
    name = escape(facts.run.path.resolve().name)
    metrics = facts.metrics
    parts = [
        *_head(facts, name, metrics),
        *_time(facts),
        *_curves(facts, metrics),
        *_layer_norms(metrics),
        *_scores(facts),
        *spans,
        *_faults(facts),
        *_attempts(facts),
        *_layout(facts, metrics),
    ]
    head = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{name}: {escape(facts.state)}</title><style>{_STYLE}</style></head>"
    return "\n".join([head, "<body><main>", *parts, "</main></body></html>"]) + "\n"


def _head(facts: Facts, name: str, metrics: Sequence[Record]) -> Iterator[str]:
    account, summary = facts.account, facts.summary
    yield f'<h1>{name}<span class="state">{escape(facts.state)}</span></h1>'
    since = f"{at_clock(account.began)} {strftime('%Z')}" if account.began else "not begun"
    wall = format_seconds(account.ledger.wall_seconds)
    doubts = "".join(f" · {escape(doubt)}" for doubt in facts.doubts)
    yield f'<p class="dim">{escape(facts.job.name)} · since {since} · {wall}{doubts}</p>'
    tiles = [
        ("effective training time", f"{account.effective_ratio:.1%}"),
        ("goodput, tokens/s", format_count(account.goodput)),
        ("steps", f"{account.steps} of {summary.steps_planned}"),
        ("faults", str(sum(bool(fault.cause) for fault in account.faults))),
        ("steps lost", str(account.steps_lost)),
    ]
    if account.ledger.seconds()["planned"] > 0:
        tiles.insert(1, ("without planned stops", f"{account.meant_ratio:.1%}"))
    if spare := account.ledger.spare_node_seconds:
        tiles.append(("spare node hours", format_number(spare / 3600)))
    if metrics:
        tiles.append(("training loss", "NaN" if summary.loss is None else f"{summary.loss:.4f}"))
    if summary.validation_loss is not None:
        tiles.append(("validation loss", f"{summary.validation_loss:.4f}"))
    if summary.validation_ema_loss is not None:
        tiles.append(("moving average", f"{summary.validation_ema_loss:.4f}"))
    if summary.tokens_per_second is not None:
        tiles.append(("tokens/s in steps", format_count(summary.tokens_per_second)))
    if summary.mfu is not None:
        tiles.append(("MFU", f"{summary.mfu:.1%}"))
    cells = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(of)}</span></div>' for of, value in tiles
    ]
    yield '<div class="tiles">' + "".join(cells) + "</div>"


def _time(facts: Facts) -> Iterator[str]:
    yield "<h2>Where the time went</h2>"
    shares = facts.shares()
    if not shares:
        yield '<p class="dim">no time has passed yet</p>'
        return
    yield f'<div class="card"><div class="bar">{ledger_bar(shares)}</div>'
    rows = [
        [
            f'<i style="background:{COLOURS[kind]}"></i>{kind}',
            f"{seconds:,.2f} s",
            f"{share:.2%}",
            MEANING[kind],
        ]
        for kind, seconds, share in shares
    ]
    rows.append(["in all", f"{facts.account.ledger.wall_seconds:,.2f} s", "100.00%", "the wall time"])
    yield html_table(["class", "time", "share", ""], rows, (1, 2)) + "</div>"


def _curves(facts: Facts, metrics: Sequence[Record]) -> Iterator[str]:
    """Yield the charts of the page's overview, with fewer points after the loss and the time of a step."""
    charts = MetricCharts(metrics, facts.events)
    sizes = {name: _MOST_POINTS if name in _LARGE_CHARTS else _MOST_FEW_POINTS for name in charts.names()}
    drawn = [charts.svg(name, most_points=most) for name, most in [*sizes.items()][:_MOST_CHARTS]]
    if cards := [f'<div class="card">{svg}</div>' for svg in drawn if svg]:
        yield "<h2>Steps</h2>"
        yield f'<div class="charts">{"".join(cards)}</div>'
    if len(sizes) > _MOST_CHARTS:
        yield f'<p class="dim">{len(sizes) - _MOST_CHARTS:,} more curves are in metrics.jsonl</p>'


def _layer_norms(metrics: Sequence[Record]) -> Iterator[str]:
    """Yield the newest norms of each layer."""
    found = next((line for line in reversed(metrics) if line.get("layer_norms")), None)
    if found is None:
        return
    norms = found["layer_norms"]
    layers = dict.fromkeys(layer for of_layers in norms.values() for layer in of_layers)
    rows = [
        [escape(str(layer)), *(_score(of_layers.get(layer)) for of_layers in norms.values())]
        for layer in layers
    ]
    headings = ["layer", *(escape(str(kind)) for kind in norms)]
    yield f"<h2>Norms of layers, step {found['step']}</h2>"
    yield f'<div class="card scroll">{html_table(headings, rows, tuple(range(1, len(headings))))}</div>'


def _scores(facts: Facts) -> Iterator[str]:
    """Yield the newest scores on tasks; if there are several evaluations, also the first scores and a small
    chart."""
    found = score_histories(facts.events)
    if not found:
        return
    several = any(len(one.steps) > 1 for one in found)
    rows = []
    for one in found[:_MOST_SCORES]:
        first = [_score(one.values[0]), _spark(one)] if several else []
        error = one.standard_errors[-1]
        last = [_score(one.values[-1]), "-" if error is None else f"± {format_number(error)}"]
        documents = "-" if one.num_documents is None else f"{one.num_documents:,}"
        rows.append([escape(one.name), *first, *last, f"{one.steps[-1]:,}", documents])
    headings = ["score", *(["first", "over steps"] if several else [])]
    headings += ["newest", "standard error", "step", "documents"]
    right = (1, 3, 4, 5, 6) if several else (1, 2, 3, 4)
    yield "<h2>Scores on tasks</h2>"
    yield f'<div class="card scroll">{html_table(headings, rows, right)}'
    if len(found) > _MOST_SCORES:
        yield f'<p class="dim">{len(found) - _MOST_SCORES:,} more scores are in events.jsonl</p>'
    yield "</div>"


def _score(value: float | None) -> str:
    return "-" if value is None else format_number(value, 4)


def _spark(one: ScoreHistory) -> str:
    columns = zip(one.steps, one.values, one.standard_errors, strict=True)
    points = [(float(step), value, error or 0.0) for step, value, error in columns if value is not None]
    return spark_svg(points[-_MOST_POINTS:], one.name) if len(points) > 1 else ""


def _faults(facts: Facts) -> Iterator[str]:
    yield "<h2>Faults</h2>"
    if not facts.account.faults:
        yield '<p class="dim">No faults.</p>'
        return
    shown = facts.account.faults[-_MOST_FAULTS:]
    if older := len(facts.account.faults) - len(shown):
        yield f'<p class="dim">the newest {len(shown)}; {older:,} older ones are in events.jsonl</p>'
    rows = [[escape(cell) for cell in row] for row in fault_cells(shown)]
    yield f'<div class="card scroll">{html_table(FAULT_HEADINGS, rows, (3, 4, 5))}</div>'


def _attempts(facts: Facts) -> Iterator[str]:
    attempts = facts.account.attempts
    if attempts:
        yield "<h2>Attempts</h2>"
        headings = [*ATTEMPT_HEADINGS, "effective"]
        spent = facts.account.ledger.by_attempt()
        rows = []
        for one, cells in zip(attempts, attempt_cells(attempts), strict=True):
            seconds = spent.get(one.number, {})
            whole = sum(seconds.values())
            share = f"{seconds['training'] / whole:.1%}" if whole else "-"
            rows.append([*map(escape, cells), share])
        yield f'<div class="card scroll">{html_table(headings, rows, (0, 1, 3, 4, 6))}</div>'


def _phase_rows(job: Job) -> list[list[str]]:
    """Return a row for each change of the batch, the sequence or the phase during the run."""
    steps, rows = JobSteps(job), []
    for segment in steps.segments[1:]:
        first = steps.first_step(segment.phase) == segment.first_step
        name = steps.phase_name(segment.phase) if segment.phase and first else "batch"
        values = f"{segment.global_batch} sequences of {segment.sequence} tokens"
        rows.append([name, f"from step {segment.first_step + 1:,}: {values}"])
    return rows


def _layout(facts: Facts, metrics: Sequence[Record]) -> Iterator[str]:
    job, summary = facts.job, facts.summary
    layout = job.layout
    axes = [(axis, getattr(layout, axis)) for axis in ("dp", "pp", "tp", "cp", "ep")]
    axes_text = " x ".join(f"{size} {axis}" for axis, size in axes if size > 1) or "one rank"
    rows = [
        ["ranks", f"{layout.world} = {axes_text}" if layout.world > 1 else axes_text],
        ["schedule", f"{layout.schedule_name}, {layout.virtual_stages} virtual stages, zero {layout.zero}"],
        ["batch", f"{job.train.global_batch} sequences of {job.model.sequence} tokens, "
                  f"{job.num_micro_batches} micro-batches of {layout.micro_batch}"],
        *_phase_rows(job),
        ["model", f"{format_count(job.model.num_parameters())} parameters, {job.model.layers} layers, "
                  f"hidden {job.model.hidden}"],
        ["device", f"{summary.device or '-'}, {summary.precision or '-'}"],
    ]  # fmt: skip
    if summary.loss_scale:
        rows.append(["float16", summary.loss_scale])
    if memory := max((line.get("memory_bytes") or 0 for line in metrics), default=0):
        rows.append(["memory of rank 0", format_bytes(memory)])
    yield "<h2>Job</h2>"
    text = escape(read_text(facts.run.job_path))
    body = html_table(None, [[escape(cell) for cell in row] for row in rows], ())
    yield f'<div class="card">{body}<details><summary>job.toml</summary><pre>{text}</pre></details></div>'


def html_table(headings: Sequence[str] | None, rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table; its cells are HTML already."""

    def row(cells: Sequence[str], tag: str) -> str:
        inside = (
            f"<{tag if cell else 'td'}{' class=n' if place in right else ''}>{cell}</{tag if cell else 'td'}>"
            for place, cell in enumerate(cells)
        )
        return "<tr>" + "".join(inside) + "</tr>"

    head = [] if headings is None else [row(headings, "th")]
    return "<table>" + "".join([*head, *(row(cells, "td") for cells in rows)]) + "</table>"
