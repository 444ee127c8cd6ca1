"""If these fail, a notebook shows wrong figures of a run, runs its markup, or writes into it."""

import os
from pathlib import Path

import numpy as np
import pytest
from ended_runs import AT, make_run, write_lines

import myriad
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.run.run_notes import write_notes
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import RECORD

MARKUP = "<script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    found = make_run(tmp_path / "runs" / "x", loss=4.0)
    lines = found.read_metrics()
    for line in lines:
        line["user"] = {MARKUP: line["step"] / 2}
    lines[2]["loss"] = None
    write_lines(found.metrics_path, lines)
    return found


def test_charts_and_the_card_are_inline_pictures_without_markup_of_the_run(run: Run) -> None:
    write_notes(run, note=MARKUP, tags=["paper"])
    before = sorted(os.listdir(run.path))
    opened = myriad.open("x")
    assert repr(opened) == f"<run {str(Path('runs') / 'x')!r}: finished, step 6>"
    assert opened.job.train.steps == 6 and opened.row.best_validation == 4.25
    card = opened._repr_html_()
    for text in ("finished", "6 of 6", "4.25", "50.0%", "paper", "validation", "<svg"):
        assert text in card
    charts = opened.charts()
    titles = [one.svg.partition("<title>")[2].partition("</title>")[0] for one in charts]
    markup = MARKUP.replace("<", "&lt;").replace(">", "&gt;")
    assert titles == ["loss", "tokens per second", "MFU", "time of a step", markup]
    by_time = opened.chart("loss", by="time").svg
    assert ">seconds</text>" in by_time and by_time != opened.chart("loss", by="tokens").svg
    assert MARKUP not in card + charts._repr_html_() + opened.chart(f"user/{MARKUP}")._repr_svg_()
    assert charts._repr_html_().count("<svg") == 5
    charts[0].save(run.path.parent / "loss.svg")
    assert (run.path.parent / "loss.svg").read_text() == charts[0].svg
    with pytest.raises(BadInputError, match="step_seconds"):
        opened.chart("los")
    with pytest.raises(BadInputError, match="steps, tokens, time"):
        opened.chart("loss", by="days")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="must be a run folder"):
        myriad.open("y")
    assert sorted(os.listdir(run.path)) == before


def test_a_new_run_has_a_card_and_no_charts(tmp_path: Path) -> None:
    new = Run(tmp_path / "new")
    new.create_or_resume(load_job("tiny"))
    opened = myriad.open(new.path)
    assert "new" in opened._repr_html_() and opened.charts() == ()
    with pytest.raises(BadInputError, match="there is none yet"):
        opened.chart()


def test_frames_need_pandas_and_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[notebook\]'"):
        _ = myriad.open("x").metrics


def test_metrics_events_and_spans_are_frames(run: Run) -> None:
    pandas = pytest.importorskip("pandas", reason="pip install 'myriad-train[notebook]'")
    opened = myriad.open(run.path)
    metrics = opened.metrics
    assert list(metrics.index) == [1, 2, 3, 4, 5, 6] and metrics.index.name == "step"
    assert metrics["time"][2] == pandas.Timestamp(AT + 20, unit="s", tz="UTC")
    assert metrics["loss"].isna().sum() == 1 and metrics["loss"].iloc[-1] == 4.0
    assert metrics[f"user/{MARKUP}"].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    run.append_metrics({"step": 7, "time": AT + 70, "loss": 3.5})
    assert opened.metrics["loss"][7] == 3.5, "a run that trains is read again"
    run.append_event("fault", rank=3, node="x", problem="silent")
    events = opened.events
    assert list(events["event"])[-2:] == ["finish", "fault"]
    newest = events.iloc[-1]
    assert (newest["rank"], newest["fields"]["problem"]) == (3, "silent") and "silent" in newest["text"]
    assert pandas.isna(newest["node"]) and pandas.isna(newest["step"])

    assert opened.spans().empty
    run.spans_path.mkdir()
    for first in (1, 3):
        records = np.zeros(8, RECORD)
        records["step"], records["rank"] = np.repeat([first, first + 1], 4), np.tile([0, 1, 2, 3], 2)
        records["start_ns"], records["duration_ns"] = (AT + records["step"]) * 1e9, 5e8
        records["name"] = records["rank"] % 2
        batch = SpanBatch(0, 1, ("forward", "backward"), records)
        write_span_file(run.spans_path / f"attempt-1-node-0-{first}.parquet", batch)
    (run.spans_path / "attempt-1-node-1-0.parquet").write_bytes(b"PAR1")
    spans = opened.spans()
    assert len(spans) == 16 and opened.problems[0].startswith("attempt-1-node-1-0.parquet: ")
    one = opened.spans(steps=range(2, 4), ranks=[1])
    assert one["step"].tolist() == [2, 3] and set(one["name"]) == {"backward"}
    assert one["start_seconds"].tolist() == [AT + 2, AT + 3] and set(one["duration_seconds"]) == {0.5}
    assert opened.spans(steps=9).empty and list(opened.spans(steps=9).columns) == list(spans.columns)
