"""The table of all job keys at the end of ``--help``: key, default, help, by section."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["show_keys"]


def show_keys() -> None:
    """Print the table of job keys."""
    from rich.console import Console
    from rich.text import Text

    from myriad.job import Job, job_keys

    console = Console()
    console.print(Text("Job keys", style="bold"), "(in a job file, or as --KEY VALUE)\n", highlight=False)
    sections: dict[str, list[tuple[str, Any]]] = {}
    for key, field in job_keys():
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
