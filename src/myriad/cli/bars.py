"""Bars on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bytes_bar", "share_bar"]


@contextmanager
def bytes_bar(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error; ``show(stage, done_bytes, total_bytes)`` moves it."""
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    off = quiet or not console.is_terminal  # where nothing moves it would leave an empty line
    with bars.Progress(*columns, console=console, transient=True, disable=off) as bar:
        task = bar.add_task("starting", total=None)

        def show(stage: str, done_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=stage, completed=done_bytes, total=total_bytes)

        yield show


@contextmanager
def share_bar(title: str, *, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar of work whose steps tell what they do; ``tell(what, share_done)`` moves it."""
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn(title + ": {task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
    console = Console(stderr=True)
    off = quiet or not console.is_terminal  # where nothing moves it would leave an empty line
    with bars.Progress(*columns, console=console, transient=True, disable=off) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)
