"""``myriad top``: a run in the terminal while it trains: step time, losses, slow and waiting ranks."""

import json
import time
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.run_argument import existing_run
from myriad.errors import BadInputError
from myriad.units import parse_ranges

if TYPE_CHECKING:
    from myriad.dashboard.run_view import Look, RunWatch

__all__ = ["look_as_json", "ranks_asked", "register"]

_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3600
_MOST_STEPS = 1000


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("top")(_top)


def _top(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")],
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Show the nodes instead: host, hardware, link traffic, health."),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two frames.")] = 2.0,
    steps: Annotated[int, typer.Option(help="Number of newest steps to analyse.")] = 50,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Estimate the step time if these ranks (3 or 0-7,12) were as fast as their peers.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one frame as a JSON object on standard output.")
    ] = False,
) -> None:
    """Watch a run in the terminal: state, step time, MFU and its losses, slow ranks, events.

    Reads only the run folder and does not slow the run; the run may be training, stopped or failed. The
    losses add up to the difference between the accelerators' peak and the measured MFU. Ctrl-C exits.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.dashboard.run_view import RunWatch
    from myriad.run import Run

    if not _LEAST_SECONDS <= every <= _MOST_SECONDS:
        raise BadInputError("--every", every, f"{_LEAST_SECONDS} to {_MOST_SECONDS:,} seconds")
    if not 1 <= steps <= _MOST_STEPS:
        raise BadInputError("--steps", steps, f"1 to {_MOST_STEPS}")
    folder = Run(existing_run(run))
    if nodes:
        from myriad.cli.top.top_nodes import show_nodes

        show_nodes(folder, once=once, every=every, as_json=as_json)
        return
    watch = RunWatch(folder, steps)
    look = watch.look()
    ranks = ranks_asked(without, look)
    if as_json:
        typer.echo(json.dumps(look_as_json(look, ranks)))
    else:
        _show(watch, look, ranks, once=once, every=every)


def ranks_asked(text: str | None, look: "Look") -> list[int]:
    """Return the ranks of ``--without``. Raises `BadInputError`."""
    world = look.job.layout.world
    try:
        return [] if text is None else sorted(set(chain(*parse_ranges(text, world))))
    except ValueError:
        raise BadInputError("--without", text, f"ranks from 0 to {world - 1}, like 3 or 0-7,12") from None


def _show(watch: "RunWatch", look: "Look", ranks: list[int], *, once: bool, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from myriad.cli.top.top_frame import frame

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(frame(look, ranks, console.width))
        return
    with Live(frame(look, ranks, console.width), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(frame(watch.look(), ranks, console.width), refresh=True)
        except KeyboardInterrupt:
            return


def look_as_json(look: "Look", ranks: list[int]) -> dict[str, Any]:
    """Return plain values for ``--json``."""
    found, losses = look.findings, look.findings.losses
    path, stuck, answer = found.path, found.standstill, found.without(ranks) if ranks else None
    return {
        "run": str(look.run.path),
        "state": look.state,
        "sentence": look.sentence,
        "step": look.step,
        "steps": look.job.train.steps,
        "world": look.job.layout.world,
        "loss": look.loss,
        "step_seconds": look.step_seconds or None,
        "tokens_per_second": look.tokens_per_second,
        "mfu": look.mfu,
        "peak_flops": look.peak_flops,
        "peak_source": look.peaks.source or None,
        "spans": {
            "attempt": look.spans.attempt,
            "steps": [int(step) for step in found.whole_steps],
            "dropped": look.spans.num_dropped,
            "unreadable_files": look.spans.num_unreadable,
            "clock_error_seconds": look.spans.clock_error_seconds,
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
        if stuck is None or look.state != "hangs"
        else {"silent": list(stuck.silent), "waited_for_by": dict(stuck.blamed), "sentence": stuck.sentence},
        "without": None
        if answer is None
        else vars(answer) | {"without_seconds": answer.without_seconds, "sentence": answer.sentence},
        "gpus": {str(node): vars(one) for node, one in look.gpus.items()},
        "steps_without_line": look.steps.without_line,
        "wrong_lines": look.num_wrong_lines,
        "events": list(look.events[-20:]),
    }
