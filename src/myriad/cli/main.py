"""``myriad``: finds the verb, and turns every error into what the user reads and the exit code that says
whose it is.

0 done · 1 the run failed · 2 bad input, nothing was changed · 130 interrupted
"""

import errno
import logging
import os
import sys
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from myriad import __version__
from myriad.cli import (
    checkpoint,
    data,
    doctor,
    evict,
    faults,
    join,
    manifests,
    network,
    parity,
    plan,
    report,
    sample,
    simulate,
    spans,
    top,
    trace,
    train,
    validate,
    watch,
)
from myriad.errors import MyriadError

__all__ = ["main"]

_VERBS = (
    train,
    join,
    evict,
    trace,
    sample,
    top,
    report,
    watch,
    parity,
    plan,
    simulate,
    network,
    spans,
    validate,
    data,
    checkpoint,
    doctor,
    faults,
    manifests,
)
_USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
_FULL = (errno.ENOSPC, errno.EDQUOT)
_USERS_PLACES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    *_FULL,
)
"""What is wrong with a file or folder that was named, wherever it is first touched: no bug."""
_CONTEXT = {"help_option_names": ["-h", "--help"]}


def build_app() -> typer.Typer:
    """The command line with all its verbs."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=_CONTEXT)
    app.callback()(_root)
    for verb in _VERBS:
        verb.register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"myriad {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, rehearse, run, show and keep alive the training of large language models."""


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits."""
    logging.basicConfig(format="myriad: %(levelname)s: %(message)s")
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = typer.main.get_command(build_app())
    _flow(command)
    try:
        code = command(arguments, prog_name="myriad", standalone_mode=False)
    except MyriadError as error:
        _tell(str(error))
        code = error.exit_code
    except _USAGE_ERROR as error:
        if message := error.format_message():  # a group without a verb has shown its help instead
            _tell(f"{message} (see --help)")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted")
        code = 130
    except BrokenPipeError:
        code = 1
    except OSError as error:
        if error.errno not in _USERS_PLACES or not error.filename:
            raise
        _tell(f"{os.fsdecode(error.filename)}: {error.strerror}")
        code = 1 if error.errno in _FULL else 2
    sys.exit(code or 0)


def _flow(command: object) -> None:
    """Help is as wide as the terminal: where a line of a docstring ends says nothing."""
    if isinstance(command, (TyperCommand, TyperGroup)):
        command.help = "\n\n".join(" ".join(one.split()) for one in (command.help or "").split("\n\n"))
    if isinstance(command, TyperGroup):
        for verb in command.commands.values():
            _flow(verb)


def _tell(text: str) -> None:
    sys.stderr.write(f"myriad: error: {text}\n")


if __name__ == "__main__":
    main()
