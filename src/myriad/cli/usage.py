"""Wrong arguments in Myriad's own words: the key, the value, what is allowed.

typer reports what pydantic found ("Input should be a valid integer, unable to parse string as an integer");
and it turns an empty path into the current folder, which a shell's unset variable must never become.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperArgument, TyperGroup, TyperOption

from myriad.errors import BadInputError

__all__ = ["refuse_empty", "refused_value"]

_EMPTY = "must not be empty"
_CHOICES = " is not one of "


def refused_value(error: Any) -> BadInputError | None:
    """Return a usage error of typer about a value, or ``None`` where it is about something else."""
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


def refuse_empty(root: object, arguments: Sequence[str]) -> None:
    """Raise `BadInputError` for an argument or an option's value that is empty, where no empty default says
    that it may be."""
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
                positional = positional[1:] or positional  # the last one may take several
            continue
        if option is None and not before.startswith("-"):  # of an unknown key, the key itself is refused
            raise BadInputError(_name(positional[0]) if positional else "argument", "", _EMPTY)
        if option is not None and not option.is_flag and option.default != "":
            raise BadInputError(before, "", _EMPTY)


def _command(root: object, arguments: Sequence[str]) -> tuple[object, list[str]]:
    """Return the verb that arguments name, and the arguments behind it."""
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
