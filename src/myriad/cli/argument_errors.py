"""Errors about wrong arguments: the key, the value, what is allowed.

typer alone reports pydantic's message ("Input should be a valid integer, unable to parse string as an
integer"). It also turns an empty path into the current folder, which must not happen for an unset variable of
a shell.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperArgument, TyperGroup, TyperOption

from myriad.errors import BadInputError

__all__ = ["refuse_empty", "refused_value"]

_EMPTY = "must not be empty"
_CHOICES = " is not one of "


def refused_value(error: Any) -> BadInputError | None:
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


def refuse_empty(root: object, arguments: Sequence[str]) -> None:
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
