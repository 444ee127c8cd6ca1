"""``myriad translate``: convert another system's configuration into a job, with a list of options that have
no counterpart."""

from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.shared_options import AsJson
from myriad.errors import BadInputError

__all__ = ["register"]

_CONFIG_BYTES = 2**20


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("translate")(_translate)


def _translate(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="DeepSpeed's JSON file, or a text file with Megatron-LM's arguments (command line or shell "
            "script).",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Job file to write. Default: standard output.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "translated",
    json: AsJson = False,
) -> None:
    """Translate Megatron-LM arguments or a DeepSpeed configuration into a job file.

    The job file lists each option in a comment: translated, without a counterpart (with what Myriad does
    instead), or unknown."""
    made = _read(config)
    text = made.toml(name)
    if out is not None:
        if out.exists():
            raise BadInputError("--out", str(out), "must be a new file")
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadInputError("--out", str(out), f"must be writable ({error.strerror})") from None
    if json:
        print_json(
            {"job": None if out is not None else text, "out": str(out) if out else None, **made.lists()}
        )
    elif out is None:
        typer.echo(text, nl=False)
    else:
        counts = f"{len(made.translated)} translated, {len(made.without)} without a counterpart"
        typer.echo(f"{out}: {made.system}: {counts}, {len(made.unknown)} unknown")
        lists = made.lists()
        for option, instead in lists["without_counterpart"].items():
            typer.echo(f"no counterpart: {option}: {instead}")
        for option in lists["unknown"]:
            typer.echo(f"unknown, not used: {option}")


def _read(config: Path) -> Any:
    """Read the configuration: a DeepSpeed configuration if the text is a JSON object, else arguments."""
    from myriad.job.translation.deepspeed_json import translate_deepspeed
    from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments
    from myriad.system.whole_file import parse_json

    try:
        with config.open("rb") as file:
            content = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise BadInputError("CONFIG", str(config), f"must be a readable file ({error.strerror})") from None
    if len(content) > _CONFIG_BYTES:
        raise BadInputError("CONFIG", str(config), f"at most {_CONFIG_BYTES >> 20} MiB")
    text = content.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return translate_arguments(read_command_line(text))
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise BadInputError("CONFIG", str(config), f"not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise BadInputError("CONFIG", str(config), "must be a JSON object")
    return translate_deepspeed(parsed)
