"""The command line: all verbs, and the error line and exit code of each kind of error.

0 done · 1 the run failed · 2 bad input, nothing was changed · 130 interrupted

An error about a wrong argument says the key, the value, and what is allowed. typer alone reports
pydantic's message ("Input should be a valid integer, unable to parse string as an integer"). It also turns
an empty path into the current folder, which must not happen for an unset variable of a shell.
"""

import contextlib
import errno
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from myriad import __version__
from myriad.cli import (
    alerts_command,
    data_command,
    doctor_command,
    eval_command,
    faults_command,
    manifests_command,
    node_commands,
    parity_command,
    report_command,
    sample_command,
    span_commands,
    translate_command,
    validate_command,
    watch_command,
)
from myriad.cli.checkpoint import checkpoint_command
from myriad.cli.many_runs import runs_command
from myriad.cli.network import network_command
from myriad.cli.plan import plan_command
from myriad.cli.simulate import simulate_command
from myriad.cli.terminal_text import terminal_text
from myriad.cli.top import top_command
from myriad.cli.train import train_command
from myriad.errors import BadInputError, MyriadError

__all__ = ["build_app", "run_command"]

_VERBS = (
    train_command,
    node_commands,
    alerts_command,
    span_commands,
    sample_command,
    eval_command,
    top_command,
    report_command,
    watch_command,
    runs_command,
    parity_command,
    plan_command,
    simulate_command,
    network_command,
    validate_command,
    data_command,
    checkpoint_command,
    translate_command,
    doctor_command,
    faults_command,
    manifests_command,
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
"""Errors about a file or folder that the user named, wherever they occur: they are bad input, not bugs."""
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class _Interrupted(MyriadError):
    """A Ctrl-C or a SIGTERM ended the command."""

    exit_code = 130


class _Root(TyperGroup):
    """The root of the command line: an interrupt of any verb ends with an error line, which typer alone does
    not print."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """Run a command; an interrupt before its verb runs counts as well."""
        self.interrupted = False
        code = super().main(*arguments, **settings)
        if self.interrupted:
            raise _Interrupted("interrupted")
        return code

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the arguments, and record an interrupt."""
        with self._noting():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb, and record an interrupt."""
        with self._noting():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            raise


def build_app() -> typer.Typer:
    """Return the command line with all its verbs."""
    app = typer.Typer(cls=_Root, add_completion=False, rich_markup_mode="rich", context_settings=_CONTEXT)
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
    """Plan, simulate, run, monitor and recover the training of large language models."""


def run_command(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    logging.basicConfig(format="myriad: %(levelname)s: %(message)s")
    command = typer.main.get_command(build_app())
    _flow(command)
    as_json = "--json" in arguments
    try:
        _refuse_empty(command, arguments)
        return command(arguments, prog_name="myriad", standalone_mode=False) or 0
    except MyriadError as error:
        return _fail(error, str(error), error.exit_code, as_json=as_json)
    except _USAGE_ERROR as error:
        if (refused := _refused_value(error)) is not None:
            return _fail(refused, str(refused), refused.exit_code, as_json=as_json)
        # The message is empty for a group without a verb, which has shown its help instead.
        if message := error.format_message():
            return _fail(error, f"{message} (see --help)", 2, as_json=as_json)
        return 2
    except (KeyboardInterrupt, typer.Abort) as error:
        return _fail(error, "interrupted", 130, as_json=as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in _FULL and not error.filename:
            return _fail(error, f"the output cannot be written: {error.strerror}", 1, as_json=False)
        if error.errno not in _USERS_PLACES or not error.filename:
            raise
        code = 1 if error.errno in _FULL else 2
        return _fail(error, f"{os.fsdecode(error.filename)}: {error.strerror}", code, as_json=as_json)


def _flow(command: object) -> None:
    """Join the lines of each help paragraph, so that help fills the terminal's width."""
    if isinstance(command, (TyperCommand, TyperGroup)):
        command.help = "\n\n".join(" ".join(one.split()) for one in (command.help or "").split("\n\n"))
    if isinstance(command, TyperGroup):
        for verb in command.commands.values():
            _flow(verb)


def _fail(error: BaseException, message: str, code: int, *, as_json: bool) -> int:
    """Write the error as a line, and with ``--json`` also as one JSON object; return the exit code."""
    sys.stderr.write(f"myriad: error: {terminal_text(message)}\n")
    if as_json:
        found: dict[str, object] = {"message": message, "exit_code": code}
        if isinstance(error, BadInputError):
            is_finite = not isinstance(error.value, float) or math.isfinite(error.value)
            value = error.value if is_finite else str(error.value)  # JSON has no NaN.
            found |= {"key": error.key, "value": value, "allowed": error.allowed}
        typer.echo(json.dumps({"error": found}, default=str))
    return code


_EMPTY = "must not be empty"
_CHOICES = " is not one of "


def _refused_value(error: Any) -> BadInputError | None:
    """Return the error for a typer usage error about a value; ``None`` for any other usage error."""
    from pydantic import ValidationError

    from myriad.config import explain

    cause, parameter = error.__cause__, getattr(error, "param", None)
    if parameter is None or not isinstance(cause, ValidationError):
        return None
    first = cause.errors()[0]
    allowed = explain(first)
    if _CHOICES in allowed:
        allowed = f"must be one of {allowed.partition(_CHOICES)[2].rstrip('.')}"
    return BadInputError(_name(parameter), first["input"], allowed)


def _refuse_empty(root: object, arguments: Sequence[str]) -> None:
    """Raise `BadInputError` for an empty argument or option value, unless the option's default is empty."""
    command, rest = _command(root, arguments)
    options = {name: one for one in _options(command) for name in one.opts}
    positional = [one for one in getattr(command, "params", ()) if isinstance(one, TyperArgument)]
    for before, token in zip(["", *rest], rest, strict=False):
        name, equals, value = token.partition("=")
        if name in options and equals and not value and options[name].default != "":
            raise BadInputError(name, "", _EMPTY)
        option = options.get(before)
        is_value = option is not None and not option.is_flag
        if token:
            if not is_value and not token.startswith("-"):
                positional = positional[1:] or positional  # The last argument may take several values.
            continue
        if option is None and not before.startswith("-"):  # For an unknown key, the key itself is refused.
            raise BadInputError(_name(positional[0]) if positional else "argument", "", _EMPTY)
        if option is not None and not option.is_flag and option.default != "":
            raise BadInputError(before, "", _EMPTY)


def _command(root: object, arguments: Sequence[str]) -> tuple[object, list[str]]:
    """Return the verb that the arguments name, and the arguments after it."""
    command, rest = root, list(arguments)
    while isinstance(command, TyperGroup) and rest and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    return command, rest


def _options(command: object) -> Iterator[TyperOption]:
    for one in getattr(command, "params", ()):
        if isinstance(one, TyperOption):
            yield one


def _name(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return str(parameter.metavar or parameter.name).strip("[]")
    return str(max(parameter.opts, key=len))
