"""The output of ``myriad train``: a live line in a terminal, plain lines at intervals elsewhere, a summary at
the end.

A screen is an `Observer` of the launcher. It only reads the run's files, so it cannot affect the run.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from myriad.cli.train.run_progress import Progress
from myriad.launchers.launcher import Observer
from myriad.reports.charts.loss_chart import loss_series, loss_svg, phase_marks, smooth, terminal_plot
from myriad.reports.run_report.run_summary import Summary
from myriad.run import Run
from myriad.run.event_text import event_text
from myriad.run.run_lines import missing_lines_text
from myriad.system.jsonl import Record
from myriad.system.whole_file import write_whole
from myriad.units import format_count, format_flops, format_seconds

__all__ = ["Screen", "open_screen", "save_plot", "show_summary"]

_PLAIN_LINE_SECONDS = 5.0
_LONGEST_SILENCE_SECONDS = 60.0
_MAX_BAR = 24
_STOPPING = "saving a checkpoint after the current step; press Ctrl-C again to stop without saving"


class Screen(Observer, Protocol):
    """An observer that must be closed."""

    def close(self) -> None:
        """Return the terminal to the shell; call it once, after the last `tick`."""


def open_screen(console: Console | None, run: Run, steps: int, quiet: Collection[str] = ()) -> Screen:
    """Return the screen for an output: live in a terminal, plain lines elsewhere, no output without a
    console. ``quiet``: events that are not shown."""
    if console is None:
        return QuietScreen()
    progress = Progress(run, steps, quiet)
    return LiveScreen(console, progress) if console.is_terminal else PlainScreen(console, progress)


class _Stop:
    """What a run still waits for after a request to stop."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._step = progress, progress.step
        self._asked_at = time.monotonic()

    def line(self) -> str:
        """Return a line with the pending work and the seconds since the request."""
        progress, seconds = self._progress, time.monotonic() - self._asked_at
        has_passed = progress.has_started and not progress.has_ended and progress.step > self._step
        waits = f"the checkpoint of step {progress.step}" if has_passed else _awaited(progress)
        return f"stopping: waiting for {waits}, {seconds:.0f} s"


def _awaited(progress: Progress) -> str:
    """Return the pending work while no step completes."""
    if progress.has_ended:
        return "the processes to end"
    if not progress.has_started:
        return "the ranks to start"
    if progress.step >= progress.steps:
        return "validation and the last checkpoint"
    return f"step {progress.step + 1} to end"


class QuietScreen:
    """A screen without output, for ``--json``: each method does nothing."""

    def tick(self) -> None:
        """Read no events and print nothing."""

    def stopping(self) -> None:
        """Ignore the request to stop."""

    def close(self) -> None:
        """Leave the terminal as it is."""


class PlainScreen:
    """Prints a line every few seconds, for logs and pipes. While no step completes it prints the pending work
    instead: after 5 s, then at growing intervals."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._shown_at, self._shown_step = 0.0, 0
        self._stop: _Stop | None = None
        self._silent_since = self._noted_at = time.monotonic()
        self._waits_for_step = 0

    def tick(self) -> None:
        """Print new events at once, and progress at intervals and at the last step."""
        for event in self._progress.poll():
            if line := _event_line(event):
                self._print(line.plain)
        progress, now = self._progress, time.monotonic()
        if self._stop is not None:
            if now - self._shown_at > _PLAIN_LINE_SECONDS:
                self._shown_at = now
                self._print(self._stop.line())
            return
        due = now - self._shown_at > _PLAIN_LINE_SECONDS or progress.step == progress.steps
        if due and progress.step != self._shown_step and (figures := progress.figures()):
            self._shown_at, self._shown_step = now, progress.step
            self._print(f"step {progress.step}/{progress.steps} · " + " · ".join(figures))
        self._note_silence(now)

    def _note_silence(self, now: float) -> None:
        if self._progress.step != self._waits_for_step:
            self._waits_for_step = self._progress.step
            self._silent_since = self._noted_at = now
        silent = now - self._silent_since
        pause = min(max(_PLAIN_LINE_SECONDS, silent / 4), _LONGEST_SILENCE_SECONDS)
        if now - self._noted_at > pause:
            self._noted_at = now
            self._print(f"waiting for {_awaited(self._progress)}, {silent:.0f} s")

    def stopping(self) -> None:
        """Print that the first Ctrl-C was received and what follows."""
        self._stop, self._shown_at = _Stop(self._progress), time.monotonic()
        self._print(_STOPPING)

    def close(self) -> None:
        """Do nothing, because this screen holds no terminal state."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveScreen:
    """Shows one line at the bottom of the terminal, with events above it.

    The launcher's ticks redraw it instead of a thread, so that the launcher stays single-threaded."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._stop: _Stop | None = None
        self._live = Live(self._line(), console=console, auto_refresh=False)
        self._live.start()

    def tick(self) -> None:
        """Print new events and redraw the line."""
        for event in self._progress.poll():
            if line := _event_line(event):
                self._console.print(line)
        self._live.update(self._line(), refresh=True)

    def stopping(self) -> None:
        """Print that the first Ctrl-C was received and what follows."""
        self._stop = _Stop(self._progress)
        self._console.print(Text(_STOPPING, style="yellow"))

    def close(self) -> None:
        """Leave the last line in place and release the terminal."""
        self._live.stop()

    def _line(self) -> Text:
        progress = self._progress
        if self._stop is not None:
            return Text(self._stop.line(), style="yellow", no_wrap=True, overflow="ellipsis")
        tail = "  ".join([f"{progress.step}/{progress.steps}", *(progress.figures() or ["starting"])])
        width = max(0, min(_MAX_BAR, self._console.width - len(tail) - 2))
        filled = width * progress.step // progress.steps
        line = Text("━" * filled, style="green", no_wrap=True, overflow="ellipsis")
        line.append("━" * (width - filled), style="bright_black")
        return line.append((" " if width else "") + tail, style="default")


def _event_line(event: Record) -> Text | None:
    """Return the line that shows an event; ``None``: the event is not shown."""
    make = _LINES.get(str(event.get("event")))
    line = None if make is None else make(event)
    return None if line is None else Text(line[0], style=line[1])


_Line = tuple[str, str]
"""A text and its style."""


def _at_step(event: Record) -> str:
    return f"step {event.get('step')}: "


def _start_line(event: Record) -> _Line:
    world, parameters = event.get("world"), event.get("parameters")
    parts = [f"{world} rank{'' if world == 1 else 's'} on {event.get('device')}", str(event.get("precision"))]
    if parameters:
        parts.append(f"{format_count(parameters)} parameters")
    if resumed := event.get("resumed_from"):
        parts.append(f"resuming from step {resumed}")
    return " · ".join(parts), "dim"


def _validation_line(event: Record) -> _Line:
    of_set = f" of {event.get('name')}" if event.get("event") == "validation_set" else ""
    loss, bits, average = event.get("loss"), event.get("bits_per_byte"), event.get("ema_loss")
    text = f"{_at_step(event)}validation loss{of_set} " + ("nan" if loss is None else f"{loss:.4f}")
    text += "" if bits is None else f", {bits:.3f} bits per byte"
    return text + ("" if average is None else f"; {average:.4f} with the moving average"), "cyan"


def _weights_line(event: Record) -> _Line:
    text = event_text(event)
    return text, "yellow" if text != f"weights from {event.get('source')}" else "dim"


def _fault_line(event: Record) -> _Line:
    loud, failures = bool(event.get("alarm")), event.get("failures", 1)
    at = "" if event.get("step") is None else f" at step {event['step']}"
    again = f" ({failures} in a row)" if failures != 1 else ""
    line = f"{'ALARM' if loud else 'fault'}{at}: {event.get('problem')}{again}"
    if gone := event.get("set_aside"):
        line += f"; set aside: {', '.join(map(str, gone))}"
    return line, "bold red" if loud else "yellow"


def _retry_line(event: Record) -> _Line:
    seconds = format_seconds(event.get("seconds", 0.0))
    return f"step {event.get('step')} is in memory only; retrying to store it for {seconds}", "yellow"


def _diagnosis_line(event: Record) -> _Line | None:
    if "problem" not in event:
        return None
    label = f"node {event.get('node')} is {event['verdict']}" if "verdict" in event else "slow"
    return f"{label}: {event['problem']}", "yellow"


def _data_line(event: Record) -> _Line | None:
    is_block = event.get("event") == "bad_block"
    if is_block and event.get("action") != "skip":
        return None  # A bad block that stops the run is also reported as a fault.
    return f"data: {event.get('problem')}{'; samples in it are replaced' if is_block else ''}", "yellow"


def _telemetry_line(event: Record) -> _Line:
    if "node" not in event:
        return _delayed_lines(event), "yellow"
    status = event.get("problem") or "it works again"
    lost = f"; {event['num_dropped']} spans are lost" if event.get("num_dropped") else ""
    return f"spans of node {event.get('node')} to {event.get('place')}: {status}{lost}", "yellow"


def _delayed_lines(event: Record) -> str:
    """Return the line about a file that cannot be written, or can be written again."""
    place = event.get("place")
    if problem := event.get("problem"):
        return f"{place} cannot be written: {problem}; its lines wait in memory"
    lost = f", {event['num_dropped']} lines are lost" if event.get("num_dropped") else ""
    return f"{place} is written again: {event.get('num_late', 0)} lines late{lost}"


def _restart_line(event: Record) -> _Line:
    other = [f"{event['dp']} replicas"] if event.get("dp") else []
    other += [f"shares {event['shares']}"] if event.get("shares") else []
    other += [f"layers cut at {event['partition']}"] if event.get("partition") else []
    changes = f" with {', '.join(other)}" if other else ""
    return f"attempt {event.get('epoch')} starts{changes}", "yellow"


def _taken_over_line(event: Record) -> _Line:
    owner = f"{event.get('url')} belonged to the run {event.get('run')}, which cannot be found from here"
    return f"{owner}; this run stores there from now on", "yellow"


def _older_state_line(event: Record) -> _Line:
    newer = f"step {event.get('newer_step')} is in {event.get('url')}"
    return f"resumes from step {event.get('step')}; {newer} (--checkpoint.url)", "yellow"


def _unused_permission_line(event: Record) -> _Line | None:
    step = event.get("step")
    if step is None:
        return None
    return f"checkpoint.restart_from_scratch was not used: step {step} was loaded", "yellow"


_LINES: Mapping[str, Callable[[Record], _Line | None]] = {
    "start": _start_line,
    "validation": _validation_line,
    "validation_set": _validation_line,
    "phase": lambda event: (f"{_at_step(event)}phase {event_text(event)}", "cyan"),
    "evaluation": lambda event: (f"{_at_step(event)}{event_text(event)}", "cyan"),
    "checkpoint": lambda event: (f"{_at_step(event)}checkpoint saved", "dim"),
    "weights": _weights_line,
    "overflow": lambda event: (f"{_at_step(event)}{event_text(event)}", "dim"),
    "fault": _fault_line,
    "retry": _retry_line,
    "diagnosis": _diagnosis_line,
    "reread": _data_line,
    "bad_record": _data_line,
    "bad_block": _data_line,
    "health": lambda event: (f"{event.get('what')}: {event.get('problem')}", "yellow"),
    "telemetry": _telemetry_line,
    "restart": _restart_line,
    "taken_over": _taken_over_line,
    "journal": lambda event: (str(event.get("problem")), "yellow"),
    "older_state": _older_state_line,
    "start_over": lambda event: (
        f"starts at step 1 again; {event.get('steps_done')} steps were done before",
        "yellow",
    ),
    "restart_from_scratch": _unused_permission_line,
    "resume": lambda event: (
        f"{_at_step(event)}state from {event.get('source')} in {event.get('seconds', 0.0):.2f} s",
        "dim",
    ),
}
"""The line of each event that is shown."""


def save_plot(run: Run) -> None:
    """Write ``loss.svg`` into the run folder, if the run has at least two losses."""
    events = run.read_events()
    training, validation = loss_series(run.read_metrics(), events)
    if len(training) > 1:
        drawn = loss_svg(training, validation, f"{run.job().name}: loss", marks=phase_marks(events))
        write_whole(run.plot_path, drawn)


def show_summary(console: Console, run: Run, summary: Summary, go_on: str) -> None:
    """Print the sample, the plot and the figures; ``go_on``: commands to type next."""
    if summary.sample:
        console.print(Panel(Text(summary.sample), title="sample", title_align="left", border_style="dim"))
    training, _ = loss_series(run.read_metrics(), ())
    for line in terminal_plot(smooth(training), width=min(64, max(20, console.width - 12))):
        console.print(Text(line, style="blue"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(summary):
        table.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    body = Group(table, Text(), Text(go_on))
    console.print(Panel(body, title=f"run {run.path.name}: {summary.state}", title_align="left"))


def _rows(summary: Summary) -> list[tuple[str, str]]:
    steps = f"{summary.steps} of {summary.steps_planned} in {format_seconds(summary.seconds)}"
    if summary.tokens:
        steps += f", {format_count(summary.tokens)} tokens"
    if missing := missing_lines_text(summary.steps_without_line):
        steps += f"; {missing}"
    rows = [("steps", steps)]
    if summary.validation_loss is not None:
        bits = summary.validation_bits_per_byte
        tail = "" if bits is None else f" nats a token, {bits:.3f} bits per byte"
        rows.append(("validation", f"{summary.validation_loss:.4f}{tail}"))
        if summary.validation_ema_loss is not None:
            rows.append(("moving average", f"{summary.validation_ema_loss:.4f} nats a token"))
    elif summary.loss is not None:
        rows.append(("training loss", f"{summary.loss:.4f}"))
    rows += [("lossy", setting) for setting in summary.lossy]
    if summary.loss_scale:
        rows.append(("float16", summary.loss_scale))
    if summary.tokens_per_second is not None:
        rows.append(("speed", f"{format_count(summary.tokens_per_second)} tokens/s"))
    if summary.mfu is not None and summary.peak_flops:
        peak = format_flops(summary.peak_flops)
        rows.append(("MFU", f"{summary.mfu:.1%} of {peak} ({summary.peak_source})"))
    rows += [("data", problem) for problem in summary.data_problems]
    rows.append(("run folder", summary.run))
    if summary.plot:
        rows.append(("plot", summary.plot))
    return rows
