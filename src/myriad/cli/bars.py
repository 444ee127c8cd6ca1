"""Bars on standard error, gone when done; none where that is no terminal: it would leave an empty line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = ["bytes_bar", "count_bar", "share_bar"]


@contextmanager
def bytes_bar(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """``show(stage, done_bytes, total_bytes)`` moves it."""
    from rich import progress as bars

    sizes = bars.DownloadColumn(binary_units=True), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
    with _open(bars.TextColumn("{task.description}"), bars.BarColumn(), *sizes, quiet=quiet) as bar:
        yield _stages(bar, "starting")


@contextmanager
def count_bar(starting: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """``show(stage, done, total)`` moves it."""
    from rich import progress as bars

    columns = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()
    with _open(*columns, quiet=quiet) as bar:
        yield _stages(bar, starting)


@contextmanager
def share_bar(title: str, *, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Of work whose steps tell what they do; ``tell(what, share_done)`` moves it."""
    from rich import progress as bars

    columns = (bars.TextColumn(title + ": {task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    with _open(*columns, quiet=quiet) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def _open(*columns: "ProgressColumn", quiet: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _stages(bar: "Progress", starting: str) -> Callable[[str, int, int], None]:
    task = bar.add_task(starting, total=None)
    return lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
