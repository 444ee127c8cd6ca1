"""``myriad``: prepare the process, run one command, and exit.

This module imports no large module, so that a Ctrl-C during the other imports also ends with one line.
SIGTERM acts like Ctrl-C: files and processes of a command are cleaned up, and the exit code is 130; after
`STOP_SECONDS` the process ends also if that hangs. A closed output (``| head``) ends a command without a
traceback; characters that the output cannot encode are replaced.
"""

import codecs
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from myriad.system.quick_process import start_quickly

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main"]

STOP_SECONDS = 20.0
"""A command has ended this long after SIGTERM."""
_PLAIN = {"·": "-", "━": "=", "─": "-", "–": "-", "—": "-", "…": "...", "×": "x", "→": "->", "►": ">"}
"""Replacements for characters that an output cannot encode; any other becomes a question mark."""


def build_app() -> "typer.Typer":
    """Return the command line with all its verbs."""
    from myriad.cli import command_line

    return command_line.build_app()


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments is None:  # this process is the command: no process of it imports from its folder
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        start_quickly()
    set_up_output()
    with _sigterm_interrupts():
        try:
            from myriad.cli.command_line import run_command

            code = run_command(given)
        except KeyboardInterrupt:  # The interrupt came before the command began, or after it ended.
            sys.stderr.write("myriad: error: interrupted\n")
            code = 130
        except BrokenPipeError:
            _abandon_output()
            code = 1
        if code == 130:
            # An interrupt inside exec() of a string, which imports use, sets a flag in CPython: the process
            # then ends by SIGINT although the interrupt was caught. The next exec() of a string clears it.
            exec("")
    code = _flushed(code)
    if code == 130 and arguments is None:
        _bound_exit()
    sys.exit(code)


def _bound_exit() -> None:
    """End this process after `STOP_SECONDS`, if a library's clean-up at exit hangs: Ray's waits for its
    control service."""

    def end() -> None:
        threading.Event().wait(STOP_SECONDS)
        _end_now()

    threading.Thread(target=end, name="myriad-exit", daemon=True).start()


def _flushed(code: int) -> int:
    """Flush standard output; return the exit code, which is 1 where that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and not code:
            sys.stderr.write(f"myriad: error: the output cannot be written: {error.strerror}\n")
        _abandon_output()
        return code or 1
    return code


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Turn SIGTERM into `KeyboardInterrupt` in this process; forked processes end by the signal.

    The interrupt arrives when Python code runs again. A call that never returns (a library's, into a kernel
    or a peer that hangs) would hold it off, and cleaning up can hang, too; so a thread ends the process after
    `STOP_SECONDS`. A command that handles SIGTERM itself, as `train` does to save, has its own limit."""
    own = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        with _ended_after_sigterm(lambda: signal.getsignal(signal.SIGTERM) is interrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _ended_after_sigterm(is_own: Callable[[], bool]) -> Iterator[None]:
    """End this process `STOP_SECONDS` after a SIGTERM in the block, if ``is_own`` says that it is to end it.

    Signals are read from the interpreter's wakeup descriptor: its C handler writes there at once, whatever
    the main thread does."""
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(each is ends[0])
    over = threading.Event()

    def wait() -> None:
        while data := ends[0].recv(64):
            if signal.SIGTERM in data and is_own():
                if not over.wait(STOP_SECONDS):
                    _end_now()
                return

    former = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="myriad-sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        if signal.set_wakeup_fd(-1) != ends[1].fileno():
            former = -1  # an event loop has taken and reset it
        signal.set_wakeup_fd(former)
        ends[1].close()
        thread.join()
        ends[0].close()


def _leave_wakeup_to_parent() -> None:
    """In a forked process: its signals are not the parent's."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_wakeup_to_parent)


def _end_now() -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"myriad: error: interrupted; it did not end within {STOP_SECONDS:g} s\n".encode())
    os._exit(130)


def set_up_output() -> None:
    """Make every text printable, whatever encoding the output has."""
    codecs.register_error("myriad-plain", _replace)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # The caller closed it: >&-.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="myriad-plain")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


def _abandon_output() -> None:
    """Discard the buffered output when its reader has gone, so that the interpreter's exit does not fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
