"""If these fail, a table of runs shows figures of another time or another run, or a damaged cache ends it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ended_runs import AT, make_run, write_lines

from myriad.many_runs import row_cache
from myriad.many_runs.row_cache import RowCache
from myriad.many_runs.run_row import read_row
from myriad.run import Run
from myriad.run.run_figures import RunFigures, read_figures


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs whose lines were read, in order. All files count as written long ago."""
    found: list[str] = []

    def read(run: Run) -> RunFigures:
        found.append(run.path.name)
        return read_figures(run)

    monkeypatch.setattr(row_cache, "read_figures", read)
    monkeypatch.setattr(row_cache, "_SETTLED_SECONDS", -1.0)
    return found


def kept_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_an_ended_run_is_read_once_and_again_after_a_file_changes(tmp_path: Path, reads: list[str]) -> None:
    run, folder = make_run(tmp_path / "run", "layout.dp=2"), tmp_path / "cache"
    first = RowCache(folder).row(run)
    assert first == read_row(run)
    assert RowCache(folder).row(run) == first, "also lists of values in its job"
    assert reads == ["run"]
    assert kept_file(folder).stat().st_mode & 0o077 == 0
    for path in (run.metrics_path, run.events_path, run.job_path):
        path.write_text(path.read_text() + "\n")
        RowCache(folder).row(run)
    assert reads == ["run"] * 4
    run.append_event("restart", time=AT + 80)
    cache = RowCache(folder)
    assert (cache.row(run).state, cache.row(run).last_line) == (read_row(run).state, AT + 80)
    assert reads == ["run"] * 5, "the second time from memory"


def test_a_run_of_the_same_path_or_time_is_another_run(tmp_path: Path, reads: list[str]) -> None:
    run, folder = make_run(tmp_path / "run", loss=4.0), tmp_path / "cache"
    RowCache(folder).row(run)
    times = run.metrics_path.stat()
    lines = [json.loads(line) | {"loss": 9.0} for line in run.metrics_path.read_text().splitlines()]
    write_lines(run.metrics_path, lines)
    os.utime(run.metrics_path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run.metrics_path.stat().st_size == times.st_size
    assert RowCache(folder).row(run).loss == 9.0
    other = make_run(tmp_path / "other")
    RowCache(folder).row(other)
    mine, theirs = (RowCache._path(folder, one) for one in (run, other))
    theirs.write_bytes(mine.read_bytes())
    assert RowCache(folder).row(other).loss == 4.0


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"stamp": []},
        {"stamp": "x"},
        {"figures": None},
        {"figures": {"loss": "low"}},
        {"figures": {"steps": 1.5}},
        {"figures": {"newest_events": [["finish"]]}},
        {"figures": {"job": ["name"]}},
        {"unknown": 1},
        "[]",
        "{",
        "",
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_wrong_file_in_the_cache_is_ignored_and_replaced(
    tmp_path: Path, reads: list[str], change: dict[str, Any] | str
) -> None:
    run, folder = make_run(tmp_path / "run"), tmp_path / "cache"
    right = RowCache(folder).row(run)
    file = kept_file(folder)
    if isinstance(change, str):
        file.write_text(change, encoding="latin-1")
    else:
        found = json.loads(file.read_text())
        own = change.get("figures")
        figures = {"figures": found["figures"] | own} if isinstance(own, dict) else {}
        file.write_text(json.dumps(found | change | figures))
    assert RowCache(folder).row(run) == right
    assert RowCache(folder).row(run) == right
    assert reads == ["run", "run"], "read again, and kept"


def test_figures_are_not_kept_while_a_run_trains_or_where_others_could_write(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = make_run(tmp_path / "run", end=""), tmp_path / "cache"
    with run.lock():
        assert RowCache(folder).row(run).state == "hangs"
    assert not list(folder.iterdir())
    folder.chmod(0o777)
    RowCache(folder).row(run)
    assert not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    RowCache(tmp_path / "file" / "below").row(run)
    folder.chmod(0o700)
    monkeypatch.setattr(row_cache, "_SETTLED_SECONDS", 1e6)
    RowCache(folder).row(run)
    assert not list(folder.iterdir()), "just written"
    assert reads == ["run"] * 4


def test_the_oldest_files_leave_the_cache(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "_MOST_FILES", 4)
    runs = [make_run(tmp_path / f"run {number}") for number in range(5)]
    for run in runs:
        RowCache(tmp_path / "cache").row(run)
    assert len(list((tmp_path / "cache").iterdir())) == 4
