"""``myriad checkpoint export``, ``import`` and ``reshard``: checkpoints in other formats and other cuts."""

import shlex
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from myriad.cli.bars import bytes_bar
from myriad.cli.json_output import print_json
from myriad.cli.overrides import OverrideCommand
from myriad.cli.runs import CHECKPOINTS
from myriad.errors import BadInputError
from myriad.spin_watch import spinning_watched

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, for programs.")]


class _Format(StrEnum):
    hf = "hf"


class _Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def register(verb: typer.Typer) -> None:
    """Adds them to ``myriad checkpoint``."""
    verb.command("export")(_export)
    verb.command("import")(_import)
    verb.command("reshard", cls=OverrideCommand, options_metavar="[OPTIONS] [--layout.KEY VALUE]...")(
        _reshard
    )


def _export(
    path: Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: new, or empty.")],
    format: Annotated[
        _Format, typer.Option(help="hf: Hugging Face, as transformers' from_pretrained reads it.")
    ] = _Format.hf,
    dtype: Annotated[_Dtype, typer.Option(help="Type of the weights that are written.")] = _Dtype.float32,
    json: _Json = False,
) -> None:
    """Write a checkpoint for other people's tools: Llama, Mistral, Arcee or GPT-2, whichever the model is.

    A model that is none of them is refused, and nothing is written."""
    from myriad.train.convert import export_hugging_face

    with spinning_watched():
        done = export_hugging_face(path, out, dtype.value)
    if json:
        print_json(done)
        return
    typer.echo(f"{out}: {done['model_type']}, {done['parameters']:,} parameters in {done['dtype']}")
    if done["why_no_tokenizer"]:
        typer.echo(f"no tokenizer: {done['why_no_tokenizer']}")


def _import(
    folder: Annotated[
        Path, typer.Argument(metavar="HF_FOLDER", help="Folder with config.json and model.safetensors.")
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to make: new, or empty.")],
    json: _Json = False,
) -> None:
    """Make a run of Hugging Face weights: to sample from, and to train from with --init-from."""
    from myriad.train.convert import import_hugging_face

    with spinning_watched():
        done = import_hugging_face(folder, run)
    if json:
        print_json(done)
        return
    tokenizer = "with its tokenizer" if done["tokenizer"] else "without a tokenizer: no text can be made"
    typer.echo(f"{run}: {done['parameters']:,} parameters, {tokenizer}")
    if done["other_end"]:
        typer.echo(f"note: {done['other_end']}")
    job, weights = shlex.quote(f"{run}/job.toml"), shlex.quote(str(run))
    typer.echo(f"train from it: myriad train {job} --run NAME --init-from {weights} --data.corpus CORPUS")


def _reshard(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL in which step-N is written.")],
    json: _Json = False,
) -> None:
    """Write a checkpoint cut for another layout: --layout.tp 2 --layout.dp 4.

    A run needs none of this: any layout goes on from any checkpoint. It saves reads at the next start, of a
    run that has OUT as its checkpoint.url.
    """
    from myriad.train.reshard import reshard_checkpoint

    overrides = OverrideCommand.of(context)
    for override in overrides:
        if not override.startswith("layout."):
            raise BadInputError(override.partition("=")[0], override.partition("=")[2], "only layout.* keys")
    with bytes_bar() as show, spinning_watched():
        done = reshard_checkpoint(path, out, overrides, partial(show, "cutting"))
    if json:
        print_json(done)
        return
    typer.echo(f"{done['out']}: step {done['step']} in {done['ranks']} files")
