"""``myriad top``: a run in the terminal while it trains: step time, losses, slow and waiting ranks."""

import json
import time
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.shared_options import RunName, WithoutRanks
from myriad.errors import BadInputError
from myriad.run import existing_run
from myriad.units import parse_ranges

if TYPE_CHECKING:
    from myriad.dashboard.run_view import RunReader, RunView

__all__ = ["register", "requested_ranks", "view_as_json"]

_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3600
_MOST_STEPS = 1000


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("top")(_top)


def _top(
    run: RunName,
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Show the nodes instead: host, hardware, link traffic, health."),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two frames.")] = 2.0,
    steps: Annotated[int, typer.Option(help="Number of newest steps to analyse.")] = 50,
    without: WithoutRanks = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one frame as a JSON object on standard output.")
    ] = False,
) -> None:
    """Watch a run in the terminal: state, step time, MFU and its losses, slow ranks, events.

    Reads only the run folder and does not slow the run; the run may be training, stopped or failed. The
    losses add up to the difference between the accelerators' peak and the measured MFU. Ctrl-C exits.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.dashboard.run_view import RunReader
    from myriad.run import Run

    if not _LEAST_SECONDS <= every <= _MOST_SECONDS:
        raise BadInputError("--every", every, f"{_LEAST_SECONDS} to {_MOST_SECONDS:,} seconds")
    if not 1 <= steps <= _MOST_STEPS:
        raise BadInputError("--steps", steps, f"1 to {_MOST_STEPS}")
    folder = Run(existing_run(run))
    if nodes:
        from myriad.cli.top.top_frame import show_nodes

        show_nodes(folder, once=once, every=every, as_json=as_json)
        return
    reader = RunReader(folder, steps)
    view = reader.read()
    ranks = requested_ranks(without, view)
    if as_json:
        typer.echo(json.dumps(view_as_json(view, ranks)))
    else:
        _show(reader, view, ranks, once=once, every=every)


def requested_ranks(text: str | None, view: "RunView") -> list[int]:
    """Return the ranks of ``--without``. Raises `BadInputError`."""
    world = view.job.layout.world
    try:
        return [] if text is None else sorted(set(chain(*parse_ranges(text, world))))
    except ValueError:
        raise BadInputError("--without", text, f"ranks from 0 to {world - 1}, like 3 or 0-7,12") from None


def _show(reader: "RunReader", view: "RunView", ranks: list[int], *, once: bool, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from myriad.cli.top.top_frame import frame

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(frame(view, ranks, console.width))
        return
    with Live(frame(view, ranks, console.width), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(frame(reader.read(), ranks, console.width), refresh=True)
        except KeyboardInterrupt:
            return


def view_as_json(view: "RunView", ranks: list[int]) -> dict[str, Any]:
    """Return plain values for ``--json``."""
    found, losses = view.findings, view.findings.losses
    path, stuck, answer = found.path, found.hang, found.without(ranks) if ranks else None
    return {
        "run": str(view.run.path),
        "state": view.state,
        "sentence": view.sentence,
        "step": view.step,
        "steps": view.job.train.steps,
        "world": view.job.layout.world,
        "loss": view.loss,
        "step_seconds": view.step_seconds or None,
        "tokens_per_second": view.tokens_per_second,
        "mfu": view.mfu,
        "peak_flops": view.peak_flops,
        "peak_source": view.peaks.source or None,
        "spans": {
            "attempt": view.spans.attempt,
            "steps": [int(step) for step in found.whole_steps],
            "dropped": view.spans.num_dropped,
            "unreadable_files": view.spans.num_unreadable,
            "clock_error_seconds": view.spans.clock_error_seconds,
        },
        "losses": None
        if losses is None
        else {
            "step_seconds": losses.step_seconds,
            "mfu": losses.mfu,
            "shares": dict(losses.shares),
            "waits_are_split": losses.split,
        },
        "slow": [vars(one) | {"sentence": one.sentence} for one in found.stragglers],
        "drifting": {rank: float(found.drift.slope[rank]) for rank in found.drifting},
        "critical_path": None
        if path is None
        else {
            "step": found.path_step,
            "seconds": path.seconds,
            "by_class": dict(path.by_class()),
            "by_rank": dict(path.by_rank()),
        },
        "waiting": None
        if stuck is None or view.state != "hangs"
        else {
            "silent": list(stuck.silent),
            "waited_for_by": dict(stuck.waited_for_by),
            "sentence": stuck.sentence,
        },
        "without": None
        if answer is None
        else vars(answer) | {"without_seconds": answer.without_seconds, "sentence": answer.sentence},
        "gpus": {str(node): vars(one) for node, one in view.gpus.items()},
        "steps_without_line": view.steps.without_line,
        "wrong_lines": view.num_wrong_lines,
        "events": list(view.events[-20:]),
    }
