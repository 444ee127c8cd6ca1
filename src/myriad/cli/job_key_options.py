"""Job keys on the command line: ``--layout.tp 2 --layout.pp=2 --model.bias`` to ``["layout.tp=2", ...]``.

A token is an override when it starts with two dashes and is a key: dotted, or one of the job's top level.
A boolean key may stand alone; any other key needs its value. `OverrideCommand` removes the overrides
before the command line parser sees the rest, which would otherwise take an unknown option's value for the
next argument. At the end of ``--help`` it shows the table of all keys: key, default, help, by section.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["OverrideCommand", "parse_overrides", "split_overrides"]

_META = "myriad.overrides"


def split_overrides(arguments: Sequence[str], own: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split arguments into overrides as ``key=value`` and all other tokens. ``own``: options of the verb,
    which take precedence over keys."""
    switches = _switches()
    top_level = _top_level() - {option.removeprefix("--") for option in own}
    overrides: list[str] = []
    rest: list[str] = []
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        key, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--") or not ("." in key or key in top_level):
            rest.append(token)
            continue
        key = key.replace("-", "_")  # Options are usually typed with dashes; no key of a job contains one.
        if not equals:
            value = _take_value(key, tokens, key in switches)
        overrides.append(f"{key}={value}")
    return overrides, rest


def parse_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the overrides as ``key=value``; any other argument is refused."""
    overrides, rest = split_overrides(arguments)
    if rest:
        raise _unknown(rest[0], ())
    return overrides


def _take_value(key: str, tokens: list[str], is_switch: bool) -> str:
    if is_switch:
        return tokens.pop(0) if tokens and tokens[0] in ("true", "false") else "true"
    if not tokens or re.match(r"--?[A-Za-z]", tokens[0]):
        raise BadInputError(key, "", f"needs a value: --{key} VALUE")
    return tokens.pop(0)


def _top_level() -> set[str]:
    from myriad.job import Job

    return set(Job.model_fields)


def _switches() -> set[str]:
    from myriad.job import job_keys

    return {key for key, field in job_keys() if field.annotation is bool}


def _unknown(token: str, options: Iterable[str], after: str = "") -> BadInputError:
    """Return the error for an option that is neither the verb's own nor a key, with the nearest of both.
    ``after``: the argument after the option."""
    from myriad.job import is_name_of, suggest_key

    name, equals, value = token.partition("=")
    value = value if equals else after
    key = suggest_key(name.lstrip("-"))
    near = [f"--{key}"] if key is not None and is_name_of(name.lstrip("-"), key) else []
    near += difflib.get_close_matches(name, options, 1, 0.6)
    near += [f"--{key}"] if key is not None else []
    hint = f"did you mean {near[0]}?" if near else "see --help for all options and keys"
    return BadInputError(name, value, f"unknown option; {hint}")


class OverrideCommand(TyperCommand):
    """A verb that takes job keys as options. Callbacks read them with ``OverrideCommand.of(context)``."""

    @staticmethod
    def of(context: Any) -> list[str]:
        """Return the overrides of this call, as ``key=value``."""
        overrides: list[str] = context.meta[_META]
        return overrides

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove the overrides, refuse unknown options with the nearest known one, and parse the rest."""
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        ctx.meta[_META], rest = split_overrides(args, own)
        for token, after in pairwise([*rest, ""]):
            if token.startswith("--") and token != "--" and token.partition("=")[0] not in own:
                raise _unknown(token, own, "" if after.startswith("--") else after)
        return super().parse_args(ctx, rest)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the job keys by section."""
        super().format_help(ctx, formatter)
        _show_keys(self.takes)

    def takes(self, key: str) -> bool:
        """Return whether the verb takes this key, so that ``--help`` shows it."""
        return True


def _show_keys(takes: Callable[[str], bool]) -> None:
    """Print the table of the job keys that the verb takes."""
    from rich.console import Console
    from rich.text import Text

    from myriad.config import read_help
    from myriad.job import Job, job_keys

    read_help(Job)
    console = Console()
    console.print(Text("Job keys", style="bold"), "(in a job file, or as --KEY VALUE)\n", highlight=False)
    sections: dict[str, list[tuple[str, Any]]] = {}
    for key, field in job_keys():
        if not takes(key):
            continue
        sections.setdefault(key.rpartition(".")[0], []).append((key, field))
    for section, keys in sections.items():
        if section:
            title = _title(Job, section)
            console.print(Text.assemble((f"[{section}] ", "bold cyan"), (title, "dim")))
        console.print(_section_table(keys))
        console.print()


def _title(config: Any, section: str) -> str:
    first, _, rest = section.partition(".")
    field = config.model_fields[first]
    return _title(field.annotation, rest) if rest else field.description or ""


def _section_table(keys: list[tuple[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="green", max_width=12)
    table.add_column()
    for key, field in keys:
        table.add_row(f"  --{key}", _default(field.default), _help(field))
    return table


def _default(value: Any) -> "Text":
    from rich.text import Text

    return Text("off" if value is None else _plain(value))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _help(field: Any) -> "Text":
    from rich.text import Text

    return Text(" ".join((field.description or "").replace("``", "").split()))
