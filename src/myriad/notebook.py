"""A run in a notebook: pandas frames of its files, and its charts as inline pictures.

    run = myriad.open("runs/x")
    run                                        a card: state, job, figures, the loss
    run.metrics["loss"].plot()                 a frame with a row for each step
    run.events, run.spans(steps=range(90, 101), ranks=[0, 5])
    run.chart("mfu", by="tokens"), run.charts()

Files are read when something is asked for, and again once they have changed, so a run may be training.
Nothing is written. Frames need pandas, pictures do not. Text of the run is escaped in
all that a notebook renders.
"""

from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.many_runs.row_cache import Stamp, stamp_of
from myriad.many_runs.run_row import RunRow, read_row
from myriad.reports.charts.metric_charts import CHART_AXES, ChartAxis, MetricCharts, figures_of
from myriad.run import Run, existing_run
from myriad.run.event_text import event_text
from myriad.run.run_lines import figure_of
from myriad.system.jsonl import Record
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_files import read_facts, read_span_file, span_files
from myriad.units import format_count, format_duration, format_number

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["OpenRun", "Picture", "Pictures", "open_run"]

_MOST_CHARTS = 40


def open_run(run: str | Path | Run) -> "OpenRun":
    """Open a run: its folder, or its name under runs/. Raises `BadInputError` where there is none."""
    return OpenRun(run if isinstance(run, Run) else Run(existing_run(run)))


class Picture:
    """A chart as SVG, which notebooks show inline."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the chart to a file as SVG. Raises ``OSError``."""
        Path(path).write_text(self.svg)


class Pictures(tuple[Picture, ...]):
    """Several charts, which notebooks show side by side."""

    def _repr_html_(self) -> str:
        return f'<div style="display:flex;flex-wrap:wrap;gap:10px">{"".join(one.svg for one in self)}</div>'


class OpenRun:
    """A run that is read, never written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._stamp: Stamp | None = None
        self._lines: tuple[list[Record], list[Record]] = [], []
        self.problems: list[str] = []
        """Span files that the last call of `spans` could not read, with the reason."""

    def __repr__(self) -> str:
        return f"<run {str(self.run.path)!r}: {self.row.state}, step {self.row.steps}>"

    @property
    def job(self) -> Job:
        """The job. Raises `BadInputError` if its file is damaged."""
        return self.run.job()

    @property
    def row(self) -> RunRow:
        """State, figures and notes, as in `myriad runs list`."""
        return read_row(self.run, *self._read())

    @property
    def metrics(self) -> "DataFrame":
        """A row for each step, by step: every number of metrics.jsonl, those of `myriad.log` as
        ``user/NAME``, and the time as a date in UTC."""
        pandas = _pandas()
        rows = [figures_of(line) for line in self._read()[0]]
        frame = pandas.DataFrame(rows, columns=list(dict.fromkeys(key for row in rows for key in row)))
        if rows:
            frame["time"] = pandas.to_datetime(frame["time"], unit="s", utc=True)
            frame = frame.astype({"step": "int64"}).set_index("step")
        return frame

    @property
    def events(self) -> "DataFrame":
        """A row for each event, oldest first: time, event, step, rank, node, its sentence as ``text``, and
        all of its fields as ``fields``."""
        pandas = _pandas()
        events = self._read()[1]
        columns: dict[str, Any] = {
            "time": pandas.to_datetime([figure_of(one.get("time")) for one in events], unit="s", utc=True),
            "event": [one["event"] for one in events],
        }
        for key in ("step", "rank", "node"):
            columns[key] = pandas.array([_whole(one.get(key)) for one in events], dtype="Int64")
        return pandas.DataFrame(
            columns | {"text": [event_text(one) for one in events], "fields": [dict(one) for one in events]}
        )

    def spans(self, steps: range | int | None = None, ranks: Collection[int] | None = None) -> "DataFrame":
        """Return the spans of some steps and ranks; of all by default, which may be gigabytes.

        Files that are damaged are left out, and named in `problems`."""
        pandas = _pandas()
        wanted = range(steps, steps + 1) if isinstance(steps, int) else steps
        self.problems = []
        frames = [_frame(pandas, *found) for found in self._batches(wanted, ranks)]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(columns=_SPAN_COLUMNS)

    def chart(self, name: str = "loss", by: ChartAxis = "steps") -> Picture:
        """Return the chart of a number of metrics.jsonl, by steps, tokens or time.

        The loss by steps has validations and phases. Raises `BadInputError` for a name without a curve."""
        if by not in CHART_AXES:
            raise BadInputError("by", by, f"must be one of {', '.join(CHART_AXES)}")
        charts = MetricCharts(*self._read())
        if (drawn := charts.svg(name, by)) is None:
            allowed = f"must be a number of two steps: {', '.join(charts.names()) or 'there is none yet'}"
            raise BadInputError("chart", name, allowed)
        return Picture(drawn)

    def charts(self, by: ChartAxis = "steps") -> Pictures:
        """Return the charts of all numbers of the steps, the loss first."""
        charts = MetricCharts(*self._read())
        drawn = (charts.svg(name, by) for name in charts.names()[:_MOST_CHARTS])
        return Pictures(Picture(svg) for svg in drawn if svg is not None)

    def _repr_html_(self) -> str:
        row = self.row
        facts = {
            "state": row.state,
            "job": row.job_name or row.problem,
            "layout": row.layout,
            "steps": f"{row.steps:,}" + ("" if row.steps_planned is None else f" of {row.steps_planned:,}"),
            "loss": _number(row.loss),
            "best validation": _number(row.best_validation),
            "tokens/s": "" if row.tokens_per_second is None else format_count(row.tokens_per_second),
            "MFU": "" if row.mfu is None else f"{row.mfu:.1%}",
            "duration": "" if row.seconds is None else format_duration(row.seconds),
            "tags": " ".join(row.notes.tags),
            "note": row.notes.note,
        }
        left = "style='text-align:left'"
        cells = "".join(
            f"<tr><th {left}>{name}</th><td {left}>{escape(value)}</td></tr>"
            for name, value in facts.items()
            if value
        )
        loss = MetricCharts(*self._read()).svg("loss") or ""
        return f"<b>{escape(row.name)}</b><table>{cells}</table>{loss}"

    def _read(self) -> tuple[list[Record], list[Record]]:
        """Return the lines of metrics.jsonl and events.jsonl, read again if a file has changed."""
        stamp = stamp_of(self.run)
        if stamp != self._stamp:
            self._lines, self._stamp = (self.run.read_metrics(), self.run.read_events()), stamp
        return self._lines

    def _batches(
        self, steps: range | None, ranks: Collection[int] | None
    ) -> Iterator[tuple[SpanBatch, np.ndarray[Any, np.dtype[np.bool_]]]]:
        """Yield the batches with wanted spans, each with which spans are wanted."""
        for path in span_files(self.run.spans_path):
            try:
                facts = read_facts(path)
                if steps is not None and (facts.last_step < steps.start or facts.first_step >= steps.stop):
                    continue
                batch = read_span_file(path)
            except (BatchError, OSError) as error:
                self.problems.append(f"{path.name}: {error}")
                continue
            wanted = np.ones(len(batch.records), bool)
            if steps is not None:
                wanted &= np.isin(batch.records["step"], list(steps))
            if ranks is not None:
                wanted &= np.isin(batch.records["rank"], list(ranks))
            if wanted.any():
                yield batch, wanted


_SPAN_COLUMNS = (
    *("rank", "step", "name", "stage", "micro_batch", "chunk"),
    *("start_seconds", "duration_seconds", "attempt", "node"),
)
"""Those of the span files."""


def _frame(pandas: Any, batch: SpanBatch, wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> "DataFrame":
    records = batch.records[wanted]
    columns: dict[str, Any] = {
        key: records[key] for key in ("rank", "step", "stage", "micro_batch", "chunk")
    } | {
        "name": np.array(batch.names, object)[records["name"]],
        "start_seconds": records["start_ns"] * 1e-9,
        "duration_seconds": records["duration_ns"] * 1e-9,
        "attempt": batch.attempt,
        "node": batch.node,
    }
    return pandas.DataFrame({key: columns[key] for key in _SPAN_COLUMNS})


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _number(value: float | None) -> str:
    return "" if value is None else format_number(value, 4)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        allowed = "not installed: pip install 'myriad-train[notebook]'"
        raise BadInputError("myriad.open", "pandas", allowed) from None
    return pandas
