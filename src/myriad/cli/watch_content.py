"""What ``myriad watch`` shows: one run, or the table of runs below some folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from myriad.errors import BadInputError
from myriad.run import existing_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from myriad.dashboard.many.run_pages import RunPages
    from myriad.dashboard.request_guard import Access, Guard
    from myriad.dashboard.run_page import RunPage
    from myriad.dashboard.watched_run import MakePlan, WatchedRun
    from myriad.run import Run

__all__ = ["MEMORY", "ManyRuns", "OneRun", "PageContent", "content_of"]

MEMORY = "2 GiB"
"""Memory for spans of one run."""
_MEMORY_OF_MANY = "512 MiB"
"""Memory for spans of each run that is opened from a table."""
_DEFAULT_FOLDER, _JOB = "runs", "job.toml"


def content_of(
    names: list[str],
    *,
    collect: Path | None = None,
    cluster: str | None = None,
    memory: str | None = None,
    write: bool = False,
) -> "PageContent":
    """Return what the arguments of the command name. Raises `BadInputError`."""
    if folders := _folders(names):
        for option, value in (("--collect", collect), ("--cluster", cluster), ("--memory", memory)):
            if value is not None:
                raise BadInputError(option, str(value), "only with one RUN")
        return ManyRuns(folders, write)
    if write:
        raise BadInputError("--write", "on", "only for a table of runs: a folder of runs, or several runs")
    path, size = existing_run(names[0]), _memory_bytes(memory or MEMORY)
    _check_collect(collect, path)
    return OneRun(_watched(path, size, cluster), collect)


def _folders(names: list[str]) -> list[Path]:
    """Return the folders of the table of runs; empty for one run. Raises `BadInputError` where no run is."""
    from myriad.many_runs.run_row import find_runs

    if not names and not Path(_DEFAULT_FOLDER).is_dir():
        raise BadInputError(
            "run", "", "a run, a folder of runs, or the name of one under runs/; or --remote URL"
        )
    if len(names) == 1 and ((Path(names[0]) / _JOB).is_file() or not Path(names[0]).is_dir()):
        return []
    folders = [
        Path(name) if Path(name).is_dir() else existing_run(name) for name in names or [_DEFAULT_FOLDER]
    ]
    for folder in folders:
        if not find_runs([folder]):
            raise BadInputError("run", str(folder), "must be a run or hold runs; this folder has none")
    return folders


class PageContent(Protocol):
    """What a page shows."""

    def app(self, access: "Access") -> "Guard":
        """Return the application that answers the page's requests."""

    def span_token(self) -> str | None:
        """Return the token by which nodes send spans; ``None``: the page takes none."""

    def end(self) -> None:
        """End what the application does beside its answers."""


@dataclass(frozen=True)
class OneRun:
    """The page of one run."""

    watched: "WatchedRun"
    collect: Path | None

    def app(self, access: "Access") -> "Guard":
        from myriad.dashboard.api.export_api import more_routes
        from myriad.dashboard.app import build_app
        from myriad.supervise.driver_requests import tracer

        more = more_routes(self.watched, tracer(self.watched.files.run))
        return build_app(self.watched, access, self.collect, more)

    def span_token(self) -> str | None:
        from myriad.telemetry.shipping.page_token import span_token

        return span_token(self.watched.files.run.path)

    def end(self) -> None:
        self.watched.end()


class ManyRuns:
    """The page of many runs, and those of single runs below it."""

    def __init__(self, folders: list[Path], may_write: bool = False) -> None:
        self.folders, self.may_write = folders, may_write
        self._pages: RunPages | None = None

    def app(self, access: "Access") -> "Guard":
        from myriad.dashboard.many.live_table import LiveTable
        from myriad.dashboard.many.run_pages import RunPages
        from myriad.dashboard.many.runs_app import build_runs_app

        table = LiveTable(self.folders)
        self._pages = RunPages(table, self._open_run)
        return build_runs_app(table, access, self._pages, may_write=self.may_write)

    def span_token(self) -> str | None:
        return None

    def end(self) -> None:
        if self._pages is not None:
            self._pages.end()

    def _open_run(self, run: "Run") -> "RunPage":
        """Read a run; its ranks can be traced only if the page may write."""
        from myriad.dashboard.api.export_api import more_routes
        from myriad.dashboard.run_page import RunPage
        from myriad.supervise.driver_requests import tracer

        watched = _watched(run.path, _memory_bytes(_MEMORY_OF_MANY), None)
        return RunPage(watched, more_routes(watched, tracer(run) if self.may_write else _refuse_trace))


def _refuse_trace(ranks: object, seconds: object, what: object) -> "Mapping[str, Any]":
    raise BadInputError("--write", "off", "needed for traces: myriad watch --write, or myriad watch RUN")


def _watched(path: Path, memory_bytes: int, cluster: str | None) -> "WatchedRun":
    from myriad.dashboard.run_files import RunFiles
    from myriad.dashboard.store.span_store import SpanStore
    from myriad.dashboard.watched_run import WatchedRun
    from myriad.run import Run

    files = RunFiles(Run(path))
    store = SpanStore(files.job.layout.world, files.job.train.steps, memory_bytes)
    make_plan = None if cluster is None else _plan_maker(cluster)
    return WatchedRun(files, store, lambda: _account(files.run), make_plan)


def _plan_maker(name: str) -> "MakePlan":
    from myriad.cli.measured_cluster import cluster_path
    from myriad.dashboard.insight.predicted_step import Plan
    from myriad.forecasts.iteration_forecast import costs_of
    from myriad.recipes.cluster import load_cluster

    cluster = load_cluster(cluster_path(name))
    return lambda job: Plan(costs_of(job, cluster))


def _account(run: "Run") -> "Mapping[str, Any]":
    from myriad.reports.run_report.run_facts import facts_of

    return facts_of(run).as_json()


def _memory_bytes(text: str) -> int:
    from myriad.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if size < 2**26:
        raise BadInputError("--memory", text, 'a size of at least "64 MiB"')
    return size


def _check_collect(folder: Path | None, run: Path) -> None:
    """Create the folder if it does not exist. Raises `BadInputError` for a folder inside the run's, which
    holds only the run's own files."""
    if folder is None:
        return
    if folder.resolve().is_relative_to(run.resolve()):
        raise BadInputError("--collect", str(folder), "must be outside the run folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError("--collect", str(folder), f"a folder ({error.strerror})") from None
