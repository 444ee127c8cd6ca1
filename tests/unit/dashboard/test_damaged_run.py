"""If this fails, a file of a run that is damaged, foreign or of another version ends a command in a
traceback.

One file of a whole run is damaged wherever hypothesis likes, and all that reads a run's folder reads it.
"""

import asyncio
import contextlib
import io
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.checkpoint_list import list_checkpoints
from myriad.cli.main import main
from myriad.cli.report_command import save_report
from myriad.cli.train.run_progress import Progress
from myriad.cli.train.train_screen import LiveScreen, PlainScreen, save_plot, show_summary
from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api import run_api
from myriad.dashboard.prometheus import RunMetrics
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.run_page import Follower
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.tile import to_json
from myriad.dashboard.watched_run import WatchedRun
from myriad.errors import MyriadError
from myriad.job import load_job
from myriad.reports.run_report.run_facts import facts_of
from myriad.reports.run_report.run_summary import is_done, summarize
from myriad.run import Run
from myriad.run.run_lines import EventLines, StepLines
from myriad.run.run_speed import Peaks
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver_address import AddressFile, DriverConnection
from myriad.supervise.policy.run_state import RunPlan
from myriad.telemetry.links.network_counters import LINK_FIELDS, CounterFile, CounterSample
from myriad.telemetry.loggers import MetricForwarder, read_forwarded
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import RECORD
from myriad.train.autotune.measurement_files import read_measured
from myriad.train.checkpoint_tools.locate_checkpoint import locate, newest_whole

_STEPS = 6
_LINES = ("metrics.jsonl", "events.jsonl", "journal.jsonl", "counters/node-0.jsonl")
_OBJECTS = (
    *("driver.json", "profile.json", "hierarchy.json", "loggers/kept.json"),
    *("checkpoints/step-4/manifest.json", "tokenizer.json"),
)
_OTHERS = (
    *("job.toml", "spans/attempt-1-node-0-0.parquet", "checkpoints/attempt", "logs/rank-0-attempt-1.log"),
)
_FOLDERS = ("spans", "logs", "checkpoints", "counters", "loggers", "checkpoints/step-4")


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 10**400, -(10**30), 2**53, 2**63, 1e308, -1e308, 1e-320, math.nan, math.inf]),
    st.sampled_from(["", "x", "[red]", "\ud800", "\x1b[2J", "a" * 5000, nested(90)]),
    st.sampled_from([[], {}, [[]], [1, "x"], {"x": 1}, {"x": [1, 2]}, [{}]]),
    st.lists(st.floats() | st.text(max_size=5), max_size=3),
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "start": ("world", "device", "precision", "peak_flops", "peak_source", "flops_per_token", "resumed_from"),
    "validation": ("step", "loss", "bits_per_byte", "seconds"),
    "checkpoint": ("step", "tier", "bytes"),
    "weights": ("source", "differs"),
    "fault": ("step", "cause", "rank", "node", "problem", "set_aside", "evidence", "failures", "alarm"),
    "retry": ("step", "seconds"),
    "diagnosis": ("node", "verdict", "problem", "evidence", "ranks", "culprit", "step"),
    "health": ("what", "problem", "node"),
    "telemetry": ("node", "place", "problem", "num_dropped", "num_late"),
    "restart": ("epoch", "dp", "shares", "partition"),
    "start_over": ("steps_done",),
    "restart_from_scratch": ("allowed", "step"),
    "resume": ("step", "seconds", "source"),
    "finish": ("step",),
    "interrupted": ("step",),
    "held": ("step", "problem", "servers"),
    "peak": ("step", "peak_flops", "peak_source"),
    "sample": ("text", "prompt"),
    "corpus": ("fingerprint", "tokens"),
    "job_changed": ("key", "before", "after", "step"),
    "spares": ("nodes",),
    "eviction": ("node", "accused"),
    "takeover": ("term",),
    "import": ("source",),
}


@st.composite
def event_lines(draw: Any) -> dict[str, Any]:
    """One with a few fields of any type, and the others left out."""
    name = draw(st.sampled_from(sorted(_FIELDS)))
    fields = draw(
        st.lists(st.sampled_from([*_FIELDS[name], "time", "late_seconds"]), max_size=4, unique=True)
    )
    return {"time": time.time(), "event": name} | {field: draw(odd) for field in fields}


@cache
def whole_run() -> Path:
    """As a run of two ranks leaves it."""
    run = Run(Path(tempfile.mkdtemp(prefix="myriad-readers-")) / "whole run")
    run.create_or_resume(load_job("tiny", ["layout.dp=2", f"train.steps={_STEPS + 2}"]))
    at = time.time() - 100.0
    run._events.append({"time": at, "event": "corpus", "fingerprint": "f", "tokens": 5})
    start = {"time": at, "event": "start", "world": 2, "device": "cpu", "precision": "float32"}
    start |= {"peak_flops": 1e10, "peak_source": "measured", "flops_per_token": 1e5, "parameters": 1000}
    run._events.append(start)
    for step in range(1, _STEPS + 1):
        line = {"time": at + step, "step": step, "loss": 6.0 / step, "grad_norm": 1.0, "tokens": 512 * step}
        run.append_metrics(line | {"step_seconds": 1.0, "tokens_per_second": 512.0, "mfu": 0.5})
    for name, fields in _EVENTS:
        run._events.append({"time": at + _STEPS, "event": name, **fields})
    journal = Journal(run.path / "journal.jsonl")
    journal.begin(RunPlan(world=2, nodes=1, first_epoch=1))
    run.spans_path.mkdir()
    records = np.zeros(2 * _STEPS, RECORD)
    records["rank"], records["step"] = np.tile([0, 1], _STEPS), np.repeat(np.arange(1, _STEPS + 1), 2)
    records["start_ns"] = (at + records["step"] - 1) * 1e9
    records["duration_ns"] = 9 * 10**8
    write_span_file(run.spans_path / "attempt-1-node-0-0.parquet", SpanBatch(0, 1, ("forward",), records))
    for name in ("loggers", "counters"):
        (run.path / name).mkdir()
    sample = CounterSample(time.time(), {"eth0": (0,) * len(LINK_FIELDS)}, (0, 0), {})
    CounterFile(run.counters_path / "node-0.jsonl", {}).append([sample])
    address = {"host": "127.0.0.1", "port": 1, "term": 0, "silent_seconds": 5.0, "alone_seconds": 5.0}
    AddressFile(run.path, address)
    for name, value in (
        ("profile", [1.0, 2.0]),
        ("hierarchy", {"in": 1.0}),
        ("loggers/kept", {"metrics": 9}),
    ):
        (run.path / f"{name}.json").write_text(json.dumps(value))
    (run.path / "tokenizer.json").write_text("{}")
    (run.path / "secret").write_text("a" * 64)
    checkpoint = CheckpointFolder(run.checkpoints_path).begin(4)
    checkpoint.commit(CheckpointManifest(4, 1, 0.0, {}, {}, {}, {}, {}, {}))
    CheckpointFolder(run.checkpoints_path).acquire(1)
    run.log_path(0, 1).write_text("Traceback (most recent call last):\nValueError: x\n")
    return run.path


_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("validation", {"step": 4, "loss": 5.0, "bits_per_byte": 2.0, "seconds": 0.1}),
    ("checkpoint", {"step": 4, "bytes": 5, "tier": "storage"}),
    ("fault", {"step": 5, "cause": "killed", "rank": 0, "node": 0, "problem": "rank 0 was killed"}),
    ("restart", {"epoch": 2, "dp": 2, "shares": None}),
    ("start", {"world": 2, "peak_flops": 1e10, "peak_source": "measured", "resumed_from": 4}),
    ("resume", {"step": 4, "seconds": 0.1, "source": "memory"}),
    ("peak", {"step": 5, "peak_flops": 2e10, "peak_source": "measured"}),
    ("diagnosis", {"node": 0, "verdict": "unfit", "problem": "slow", "evidence": {"idle_seconds": 1.0}}),
    ("telemetry", {"place": "metrics.jsonl", "problem": "", "num_late": 1, "num_dropped": 0}),
]


class Kept:
    """A tool."""

    def write(self, step: int, time: float, scalars: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def verb(*arguments: object) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
    assert end.value.code in (0, 2), errors.getvalue()
    text = errors.getvalue()
    assert text.count("\n") == (end.value.code == 2), text
    return int(end.value.code or 0)


def refused(read: Callable[[], Any], *others: type[BaseException]) -> Any:
    with contextlib.suppress(MyriadError, *others):
        return read()
    return None


def read_everything(path: Path) -> None:
    for read in (read_verbs, resume, load, hand_on, see, watch):
        read(Run(path))


def read_verbs(run: Run) -> None:
    for arguments in (("report",), ("report", "--json"), ("top", "--once"), ("top", "--json")):
        verb(arguments[0], run.path, *arguments[1:])
    verb("checkpoint", "list", run.path)


def resume(run: Run) -> None:
    """What `myriad train` reads before it starts ranks."""
    job = load_job("tiny", ["layout.dp=2", f"train.steps={_STEPS + 4}"])
    refused(lambda: run.check(job))
    refused(lambda: run.changes(job))
    refused(run.past)
    for read in (run.last_step, run.next_attempt, run.num_starts, lambda: is_done(run, 8)):
        read()
    journal = Journal(run.path / "journal.jsonl")
    journal.left_over()
    journal.last_term()
    for name in ("profile.json", "hierarchy.json"):
        refused(
            lambda name=name: read_measured(run.path / name, lambda value: isinstance(value, list | dict))
        )


def load(run: Run) -> None:
    """What `myriad sample` and `myriad checkpoint` read."""
    folder = CheckpointFolder(run.checkpoints_path)
    refused(lambda: newest_whole(locate(str(run.path)), every_byte=True))
    for step in folder.steps():
        verify(folder.at_step(step))
    list_checkpoints(None, folder)


def hand_on(run: Run) -> None:
    """Loggers, node agents."""
    MetricForwarder("kept", run.path, lambda name, place: Kept()).forward()
    read_forwarded(run.path, "kept")
    asyncio.run(reach(run.path))


async def reach(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        async with DriverConnection(path).link():
            pass


def see(run: Run) -> None:
    """What `myriad train` shows."""
    for console in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True)):
        progress = Progress(run, _STEPS)
        for tail in (progress._metrics, progress._events):
            tail._offset = 0
        screen = (LiveScreen if console.is_terminal else PlainScreen)(console, progress)
        screen.tick()
        screen.tick()
        screen.close()
        if (summary := refused(lambda: summarize(run))) is not None:
            show_summary(console, run, summary, "")
            json.dumps(summary.as_json())
    refused(lambda: save_plot(run), OSError)
    save_report(run)


def watch(run: Run) -> None:
    """What `myriad watch` shows."""
    if (files := refused(lambda: RunFiles(run))) is None:
        return
    watched = WatchedRun(files, SpanStore(2, _STEPS), lambda: facts_of(run).as_json())
    Follower(watched).poll()
    analyst = Analyst(watched)
    for found in (
        run_api.run(watched, analyst, {}),
        run_api.overview(watched, {}),
        run_api.faults(watched, {}),
        run_api.shares(watched, analyst, {}),
        run_api.waterfall(watched, analyst, {}),
    ):
        to_json(found)
    assert RunMetrics(run, lambda: watched.account).text()


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="myriad-readers-") as folder:
        path = Path(folder) / "a run"
        shutil.copytree(whole_run(), path)
        yield path


some = settings(
    max_examples=int(os.environ.get("DAMAGED_RUNS", "4")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
_PUT = (b"", b"\0" * 50, b"\xff\xfe", b"\n", b"[" * 100_000, b'{"a":' * 100_000, b"1e999", b"9" * 5000, b'"')
_KEYS = ("host", "port", "term", "silent_seconds", "alone_seconds", "beat", "metrics", "events")


def test_a_whole_run_can_be_read() -> None:
    with copied() as path:
        read_everything(path)
        assert verb("report", path) == 0 and "are wrong" not in (path / "report.html").read_text()


@some
@given(file=st.sampled_from([*_LINES, *_OBJECTS, *_OTHERS]), at=st.floats(0, 1), put=st.sampled_from(_PUT),
       cut=st.sampled_from([0, 1, 7, 10**9]))  # fmt: skip
@example("checkpoints/step-4/manifest.json", 0.0, b"[" * 100_000, 10**9)
@example("loggers/kept.json", 0.0, b"[" * 100_000, 10**9)
def test_a_torn_file(file: str, at: float, put: bytes, cut: int) -> None:
    with copied() as path:
        content = (path / file).read_bytes()
        start = round(at * len(content))
        (path / file).write_bytes(content[:start] + put + content[start + cut :])
        read_everything(path)


@some
@given(file=st.sampled_from(_OBJECTS), value=odd, key=st.sampled_from(_KEYS), whole=st.booleans())
def test_an_object_of_another_shape(file: str, value: Any, key: str, whole: bool) -> None:
    with copied() as path:
        content = json.loads((path / file).read_bytes())
        if not whole and isinstance(content, dict):
            value = content | {key: value}
        (path / file).write_text(json.dumps(value))
        read_everything(path)


@some
@given(lines=st.lists(event_lines(), min_size=1, max_size=4))
@example([{"time": 1e12, "event": "fault", "problem": "x"}])
@example([{"time": 1e9, "event": "restart", "dp": 0}])
@example([{"time": 1e9, "event": "validation", "loss": 1.0, "bits_per_byte": [1]}])
@example([{"time": 1e9, "event": "resume", "resumed_from": "aaa", "seconds": "soon"}])
@example([{"time": 1e9, "event": "start", "world": 2, "peak_flops": 1e-320, "flops_per_token": "x"}])
def test_events_of_another_version(lines: list[Any]) -> None:
    with copied() as path:
        with (path / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.write('{"event": "note", "evidence": ' + "[" * 900 + "]" * 900 + "}\n")
        read_everything(path)


@some
@given(file=st.sampled_from(_LINES), at=st.integers(0, 20), value=odd, whole=st.booleans(), data=st.data())
def test_a_line_with_other_values(file: str, at: int, value: Any, whole: bool, data: Any) -> None:
    with copied() as path:
        lines = [json.loads(line) for line in (path / file).read_text().splitlines()]
        line = lines[at % len(lines)]
        keys = data.draw(st.lists(st.sampled_from(sorted(line)), min_size=1, max_size=3))
        lines[at % len(lines)] = value if whole else line | dict.fromkeys(keys, value)
        (path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        read_everything(path)


@some
@given(
    file=st.sampled_from([*_LINES, *_OBJECTS, *_OTHERS, *_FOLDERS]),
    kind=st.sampled_from(["folder", "missing", "empty", "loop", "pipe", "full"]),
)
@example("loggers/kept.json", "pipe")
@example("spans/attempt-1-node-0-0.parquet", "pipe")
@example("checkpoints/step-4/manifest.json", "pipe")
@example("checkpoints", "loop")
def test_something_else_in_its_place(file: str, kind: str) -> None:
    with copied() as path:
        target = path / file
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
        if kind == "folder":
            target.mkdir()
        elif kind == "empty":
            target.touch()
        elif kind == "pipe":
            os.mkfifo(target)
        elif kind != "missing":
            target.symlink_to(target.name if kind == "loop" else "/dev/full")
        read_everything(path)


def test_a_file_that_shrinks_while_it_is_read_gives_what_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    path, read = tmp_path / "metrics.jsonl", os.pread
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 300_000)))

    def shrink(handle: int, size: int, offset: int) -> bytes:
        data = read(handle, size, offset)
        os.truncate(path, 10)
        return data

    tail = StepLines(path)
    monkeypatch.setattr(os, "pread", shrink)
    first = len(tail.poll())
    monkeypatch.undo()
    assert 0 < first < 300_000 and tail.num_wrong == 0
    path.write_text('{"step": 1}\n')
    tail.poll()
    assert [line["step"] for line in tail.lines] == [1], "another file is there now"


def test_wrong_fields_of_an_event_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    found = [
        {"time": 1e9, "event": "fault", "step": 3, "rank": "x", "mine": [1]},
        {"time": 1e9, "event": "validation", "loss": None},
        {"time": -1, "event": "finish"},
        {"time": 1e9},
        {"event": 5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    events = EventLines(path)
    assert events.poll() == [
        {"time": 1e9, "event": "fault", "step": 3, "mine": [1]},
        {"time": 1e9, "event": "validation"},
        {"event": "finish"},
    ]
    assert events.num_wrong == 4


def test_mfu_is_of_the_last_peak_of_the_same_ranks_wherever_it_is_shown() -> None:
    start = {"event": "start", "device": "cpu", "precision": "float32", "threads": 1, "flops_per_token": 10.0}
    peaks = Peaks(
        [
            start | {"time": 10.0, "world": 1, "peak_flops": 1000.0, "peak_source": "early"},
            {"event": "peak", "time": 20.0, "peak_flops": 2000.0, "peak_source": "late"},
            start | {"time": 30.0, "world": 2, "peak_flops": 3000.0, "peak_source": "both"},
        ]
    )
    lines = [{"time": time, "tokens_per_second": 100.0, "mfu": 0.9} for time in (15.0, 25.0, 35.0)]
    assert list(map(peaks.mfu, lines)) == [0.5, 0.5, pytest.approx(1 / 3)]
    assert (peaks.flops_per_second, peaks.source) == (3000.0, "both")
    assert Peaks().mfu(lines[0]) == 0.9, "as the line has it, where no peak is known"
