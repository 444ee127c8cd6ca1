"""``myriad train``: start or resume a run, and print its progress."""

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.shared_options import Oversubscribes
from myriad.errors import NO_STATE, BadInputError, RunFailedError

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.job import Job
    from myriad.job.job_changes import JobChange
    from myriad.reports.run_report.run_summary import Summary
    from myriad.run import Run
    from myriad.train.inputs import JobInputs

__all__ = ["register", "train"]

_INTERRUPTED = 130
_DEFAULT_JOB = "embedded"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("train", cls=OverrideCommand, options_metavar="[OPTIONS] [--KEY VALUE]...")(train)


def train(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Job file, recipe, or run to resume (its folder, or its name under runs/)."
        ),
    ] = _DEFAULT_JOB,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Run folder: a name under runs/, or a path. Default: the job's name."
        ),
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Start from these weights; short for --train.init_from."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How nodes are started; short for --resilience.engine."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the job with sbatch (engine slurm, outside a Slurm job).")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Run a standby driver for the run folder JOB; it takes over when the driver is lost.",
        ),
    ] = False,
    oversubscribe: Oversubscribes = False,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Train a job of one rank in this process, without supervision: for debuggers and profilers.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object, at the end.")] = False,
) -> None:
    """Train a model, or resume a run.

    Starts the ranks of the job's layout, prints progress, and stores everything in the run folder.

    Ctrl-C saves a checkpoint and stops; the same command resumes from it.

    Keys given with an existing run change it from the next step on (learning rate, schedule, data, layout,
    ...). The model, train.seed and optimizer.name cannot change: see docs/guide/resume.md.

    Exit code: 0 done, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    from rich.console import Console

    from myriad.cli.train import start_checks

    overrides = OverrideCommand.of(context)
    short = {"train.init_from": init_from, "resilience.engine": engine}
    given = [*overrides, *(f"{key}={value}" for key, value in short.items() if value is not None)]
    resolved, folder = _resolve(job, run, given, spread=not in_process)
    console = None if as_json else Console()
    start_checks.check_restart(resolved, overrides)
    if standby:
        start_checks.check_standby_options(job, folder, resolved, overrides)
        _end(folder, _stand_by(folder, resolved, console), console, oversubscribe)
        return
    start = _Start(folder, resolved, overrides, console, oversubscribe, in_process, submit)
    is_queued, changes = start.check()
    if start.is_done(changes):
        _report(folder, console, oversubscribe)
        return
    inputs = start.open_inputs(changes, is_queued)
    if is_queued:
        start.queue()
    else:
        _end(folder, start.train(inputs, changes), console, oversubscribe)


@dataclass(frozen=True)
class _Start:
    """A start of a run, as the command line asks for it."""

    run: "Run"
    job: "Job"
    overrides: Sequence[str]
    console: "Console | None"
    """``None``: with --json, which prints nothing before the end."""
    oversubscribe: bool
    in_process: bool
    submit: bool

    def check(self) -> "tuple[bool, Sequence[JobChange]]":
        """Refuse what this machine or the run cannot do. Return whether Slurm starts the run later, and the
        keys that change."""
        from myriad.cli.train import start_checks
        from myriad.launchers.launcher import check_engine

        self.run.check(self.job)
        check_engine(self.job, oversubscribe=self.oversubscribe)
        start_checks.check_device(self.job)
        if self.in_process:
            from myriad.train.in_process import check_in_process

            check_in_process(self.job)
        is_queued = start_checks.is_queued(self.job, self.submit)
        return is_queued, self.run.changes(self.job) if self.run.exists else []

    def is_done(self, changes: "Sequence[JobChange]") -> bool:
        """Return whether the run has trained all of its steps; refuse keys that it would ignore."""
        from myriad.cli.train.start_checks import refuse_unused
        from myriad.reports.run_report.run_summary import is_done

        steps = self.job.train.steps
        if not is_done(self.run, steps):
            return False
        refuse_unused(self.run, changes, self.job)
        _print_line(self.console, f"{self.run.path} is already finished ({steps} of {steps} steps)")
        return True

    def open_inputs(self, changes: "Sequence[JobChange]", is_queued: bool) -> "JobInputs":
        """Check the services and folders of the run, and open its training text."""
        from myriad.cli.train import start_checks
        from myriad.launchers.run_start import check_journal
        from myriad.train.inputs import open_run_inputs

        for warning in start_checks.redis_exposures(self.job):
            sys.stderr.write(f"myriad: WARNING: {warning}\n")
        if not is_queued:
            check_journal(self.run, self.job.resilience)
        warn = partial(_print_line, self.console, style="yellow")
        start_checks.check_storage(self.run, self.job, changes, self.overrides, warn)
        inputs = open_run_inputs(self.run, self.job, lambda stage: _print_line(self.console, f"{stage} ..."))
        for name in inputs.unchecked:
            reason = f"tokens are read unchecked (myriad data hash {name} adds them)"
            _print_line(self.console, f"{name} has no block hashes: {reason}")
        if self.job.train.init_from is not None:
            from myriad.train.checkpoint_tools.initial_weights import check_initial

            check_initial(self.run, self.job)
        return inputs

    def queue(self) -> None:
        """Write the script of a Slurm job, and submit it with --submit."""
        with self.run.lock():
            self.run.create_or_resume(self.job)
            self.run.allow_restart(allowed=self.job.checkpoint.restart_from_scratch)
        with self.run.shared_as_folder():
            _queue(self.run, self.job, self.submit, self.console)

    def train(self, inputs: "JobInputs", changes: "Sequence[JobChange]") -> str:
        """Train until the run ends, and return how it ended."""
        from myriad.launchers.slurm import in_allocation
        from myriad.train.inputs import keep_inputs

        run, job, console = self.run, self.job, self.console
        with run.lock():
            step = run.last_step()
            run.create_or_resume(job)
            if job.checkpoint.restart_from_scratch or not in_allocation():  # A batch job asked earlier.
                run.allow_restart(allowed=job.checkpoint.restart_from_scratch)
            for change in (*changes, *keep_inputs(run, job, inputs)):
                _print_line(console, f"changed after step {step}: {change}", style="yellow")
            try:
                return (_train_here if self.in_process else _launch)(run, job, console)
            except RunFailedError as error:  # The rest of the run is reported all the same.
                if console is None or NO_STATE not in str(
                    error
                ):  # Otherwise there is no state to resume from.
                    _report(run, console, self.oversubscribe, error)
                if console is None:
                    sys.stderr.write(f"myriad: error: {error}\n")
                    raise typer.Exit(error.exit_code) from None
                raise


def _print_line(console: "Console | None", text: str, style: str | None = None) -> None:
    """Print one line as it is; nothing without a console."""
    if console is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def _end(run: "Run", ended: str, console: "Console | None", oversubscribe: bool) -> None:
    """Report how the run ended, also by the exit code."""
    if ended == "left":
        _print_line(console, f"standby ended: another driver is training {run.path}")
        raise typer.Exit(_INTERRUPTED)
    if _report(run, console, oversubscribe, ended=ended):
        return
    if ended == "interrupted":
        raise typer.Exit(_INTERRUPTED)
    sys.stderr.write(f"myriad: error: all ranks ended before the last step (logs: {run.logs_path})\n")
    raise typer.Exit(RunFailedError.exit_code)


def _stand_by(run: "Run", job: "Job", console: "Console | None") -> str:
    from myriad.cli.train.train_screen import open_screen
    from myriad.launchers.external_nodes import stand_by

    text = f"standby for {run.path}: takes over if its driver is lost; Ctrl-C ends the standby"
    _print_line(console, text)
    screen = open_screen(console, run, job.train.steps)
    try:
        return stand_by(run, job, screen)
    finally:
        screen.close()


def _queue(run: "Run", job: "Job", submit: bool, console: "Console | None") -> None:
    from myriad.launchers.slurm import submit as submit_script
    from myriad.launchers.slurm import write_script

    script = write_script(run, job)
    number = submit_script(script) if submit else None
    if console is None:
        typer.echo(json.dumps({"run": str(run.path), "script": str(script), "job": number}))
    elif number is None:
        _print_line(console, f"sbatch {script}")
    else:
        _print_line(console, f"job {number}: {script} (logs in {run.logs_path})")


def _resolve(job: str, run: str | None, overrides: list[str], *, spread: bool) -> "tuple[Job, Run]":
    from myriad.cli.train import start_checks
    from myriad.job import load_job
    from myriad.run import Run

    path = start_checks.find_run_folder(job)
    if path is not None:
        if run is not None:
            raise BadInputError("--run", run, f"must be left out: JOB is the run folder {path}")
        folder = Run(path)
        if not folder.exists:
            raise BadInputError("job", job, "must be a run folder; this folder has no job.toml")
        folder.check_job_file()
        return load_job(str(folder.job_path), overrides), folder
    if run == "":
        raise BadInputError("--run", run, "a name, or a path")
    resolved = load_job(job, overrides)
    folder = Run(_run_path(run or resolved.name))
    return load_job(job, _spread(job, overrides, folder) if spread else overrides), folder


def _spread(job: str, overrides: list[str], run: "Run") -> list[str]:
    """Return the overrides with a layout for the default job. On two cores it is fastest as two data-parallel
    ranks of one thread each (measured; the result equals that of one rank). A given layout and the layout of
    an existing run take precedence."""
    from myriad.system.machine import num_cores

    if job != _DEFAULT_JOB or any(key.startswith(("layout.", "train.threads")) for key in overrides):
        return overrides
    replicas = run.job().layout.dp if run.exists else min(2, num_cores())
    return [f"layout.dp={replicas}", *overrides]


def _run_path(name_or_path: str) -> Path:
    return Path(name_or_path) if "/" in name_or_path else Path("runs") / name_or_path


def _train_here(run: "Run", job: "Job", console: "Console | None") -> Literal["finished", "interrupted"]:
    """Train in this process; progress is printed as lines, so that a debugger can use the terminal."""
    from myriad.cli.train.run_progress import Progress
    from myriad.cli.train.train_screen import PlainScreen
    from myriad.launchers.metric_loggers import logged
    from myriad.train.in_process import train_in_process

    with logged(run, job.telemetry.loggers):
        if console is None:
            return train_in_process(run)
        screen = PlainScreen(console, Progress(run, job.train.steps))
        return train_in_process(run, screen.tick)


def _launch(run: "Run", job: "Job", console: "Console | None") -> Literal["finished", "interrupted"]:
    from myriad.cli.train.train_screen import open_screen
    from myriad.launchers.launcher import train_on

    if job.resilience.engine == "join":
        nodes = f"{job.resilience.nodes} node{'' if job.resilience.nodes == 1 else 's'}"
        join = f"{_program()} join {shlex.quote(str(run.path.resolve()))}"
        _print_line(console, f"starts when {nodes} have joined; on each, run `{join}`")
    screen = open_screen(console, run, job.train.steps)
    try:
        return train_on(job)(run, job.layout.world, threads=job.train.threads, observer=screen)
    finally:
        screen.close()


def _report(
    run: "Run",
    console: "Console | None",
    oversubscribe: bool,
    error: RunFailedError | None = None,
    ended: str = "",
) -> bool:
    """Print the state of a run, and return whether it is finished. ``error``: the error that ended it.
    ``ended``: the driver's report."""
    from myriad.cli.report_command import save_report
    from myriad.cli.train.train_screen import save_plot, show_summary
    from myriad.data.corpus_opening import EMBEDDED
    from myriad.reports.run_report.run_summary import finished_unwritten, lost_lines_warning, summarize

    # A full disk has no room for the picture; the trained state is stored.
    with run.shared_as_folder():
        with contextlib.suppress(OSError):
            save_plot(run)
        save_report(run)
    summary = summarize(run)
    if ended == "finished":
        summary = finished_unwritten(run, summary)
    finished = summary.state == "finished"
    if finished and ended and (warning := lost_lines_warning(run, summary)):
        sys.stderr.write(f"myriad: WARNING: {warning}\n")
    if console is None:
        failed = error and {"error": {"message": str(error), "exit_code": error.exit_code}}
        typer.echo(json.dumps(summary.as_json() | (failed or {})))
        return finished
    path = shlex.quote(str(run.path))
    again = f"{_program()} train {path}{' --oversubscribe' if oversubscribe else ''}"
    if not finished:
        if summary.held is not None:
            _report_held(console, summary.held, path, again)
            return False
        _print_line(console, _stopped(run, summary, again))
        return False
    longer = f"{again} --train.steps {2 * summary.steps_planned}"
    prompt = "def " if run.job().data.corpus == EMBEDDED else "The "
    sample = f'{_program()} sample {path} --prompt "{prompt}"'
    show_summary(console, run, summary, f"resume:  {longer}\nsample:  {sample}")
    return True


def _report_held(console: "Console", held: dict[str, Any], path: str, again: str) -> None:
    """Print where the unstored state is, and the commands that store, resume or discard it."""
    servers = ", ".join(
        f"process {one.get('pid')} on {one.get('host')} (node {one.get('node')})"
        for one in held.get("servers") or []
    )
    checkpoint = f"{_program()} checkpoint"
    lines = [
        f"stopped at step {held['step']}, held in memory only: {held['problem']}",
        f"in memory: {servers}, until it is stored or released, or the machine goes down",
        f"store it elsewhere: {checkpoint} save {path} --to FOLDER_OR_URL",
        f"and then resume:    {again} --checkpoint.url FOLDER_OR_URL",
        f"or make room here:  {again}",
        f"or give it up:      {checkpoint} release {path}",
    ]
    for line in lines:
        _print_line(console, line)


def _stopped(run: "Run", summary: "Summary", again: str) -> str:
    """Return where an unfinished run stopped, and the command that resumes it."""
    step, stored = summary.resumes_from_step, summary.saved_step
    if step is None:
        return f"stopped before the first step was saved; `{again}` starts from the first step"
    at = f"stopped at step {step}"
    if summary.resumes_from == "memory" and step != stored:
        minutes = run.job().checkpoint.linger_seconds / 60
        at += f", kept in memory for {minutes:g} minutes (stored: {f'step {stored}' if stored else 'none'})"
    return f"{at}; `{again}` resumes from there"


def _program() -> str:
    """Return the command that calls this program from any folder: its name, if it is on the PATH."""
    called, found = Path(sys.argv[0]).absolute(), shutil.which("myriad")
    if called.name != "myriad" or (found is not None and Path(found).resolve() == called.resolve()):
        return "myriad"
    return shlex.quote(str(called))
