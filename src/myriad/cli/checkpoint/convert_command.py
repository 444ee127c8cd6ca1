"""``myriad checkpoint export``, ``import`` and ``reshard``: checkpoints in other formats and layouts."""

import shlex
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.progress_bar import bytes_bar
from myriad.cli.run_argument import CHECKPOINTS
from myriad.errors import BadInputError
from myriad.system.spin_control import spinning_controlled

__all__ = ["register"]

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


class _Format(StrEnum):
    hf = "hf"


class _Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def register(verb: typer.Typer) -> None:
    """Add export, import and reshard to ``myriad checkpoint``."""
    verb.command("export")(_export)
    verb.command("import")(_import)
    verb.command("reshard", cls=OverrideCommand, options_metavar="[OPTIONS] [--layout.KEY VALUE]...")(
        _reshard
    )


def _export(
    path: Annotated[str, typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder: new or empty.")],
    format: Annotated[
        _Format, typer.Option(help="hf: Hugging Face format, for transformers' from_pretrained.")
    ] = _Format.hf,
    dtype: Annotated[_Dtype, typer.Option(help="Data type of the written weights.")] = _Dtype.float32,
    json: _Json = False,
) -> None:
    """Write a checkpoint for other tools, as a Llama, Mistral, Arcee or GPT-2 model.

    A model with another architecture is refused; nothing is written then."""
    from myriad.train.checkpoint_tools.hugging_face_convert import export_hugging_face

    with spinning_controlled():
        done = export_hugging_face(path, out, dtype.value)
    if json:
        print_json(done)
        return
    typer.echo(f"{out}: {done['model_type']}, {done['parameters']:,} parameters in {done['dtype']}")
    if done["why_no_tokenizer"]:
        typer.echo(f"no tokenizer: {done['why_no_tokenizer']}")


def _import(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folder: Hugging Face (config.json, model.safetensors), Megatron-LM (torch or "
            "torch_dist, any tp and pp) or DeepSpeed (ZeRO 1 to 3, universal).",
        ),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to create: new or empty.")],
    config: Annotated[
        Path | None,
        typer.Option(help="config.json of the model that DeepSpeed trained. Default: beside the checkpoint."),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Skip the optimizer state; the run starts at step 1.")
    ] = False,
    json: _Json = False,
) -> None:
    """Make a run from another system's checkpoint, to sample from or to train further.

    Imports the optimizer state of Megatron-LM and DeepSpeed: training resumes at the next iteration. Code in
    the files is never run.
    """
    from myriad.train.checkpoint_tools.foreign_import import import_foreign, is_foreign

    with spinning_controlled():
        if is_foreign(folder):
            done = import_foreign(folder, run, config=config, weights_only=weights_only)
        else:
            from myriad.train.checkpoint_tools.hugging_face_convert import import_hugging_face

            done = import_hugging_face(folder, run)
    if json:
        print_json(done)
    elif "system" in done:
        _show_foreign(run, done)
    else:
        _show_hugging_face(run, done)


def _show_hugging_face(run: Path, done: Mapping[str, Any]) -> None:
    tokenizer = "with its tokenizer" if done["tokenizer"] else "without a tokenizer: no text can be made"
    typer.echo(f"{run}: {done['parameters']:,} parameters, {tokenizer}")
    if done["other_end"]:
        typer.echo(f"note: {done['other_end']}")
    job, weights = shlex.quote(f"{run}/job.toml"), shlex.quote(str(run))
    typer.echo(f"train from it: myriad train {job} --run NAME --init-from {weights} --data.corpus CORPUS")


def _show_foreign(run: Path, done: Mapping[str, Any]) -> None:
    state = f"optimizer state of step {done['step']}" if done["optimizer"] else "weights alone"
    typer.echo(f"{run}: {done['system']}: {done['parameters']:,} parameters, {state}")
    for note in done["notes"]:
        typer.echo(f"note: {note}")
    for option, text in done["without_counterpart"].items():
        typer.echo(f"no counterpart: {option}: {text}")
    if done["unknown"]:
        typer.echo(f"unknown options, not used ({run}/import.json): {', '.join(done['unknown'])}")
    job, place = shlex.quote(f"{run}/job.toml"), shlex.quote(str(run))
    begins = f"--run {place}" if done["optimizer"] else f"--run NAME --init-from {place}"
    typer.echo(f"train from it: myriad train {job} {begins} --data.corpus CORPUS --train.steps STEPS")


def _reshard(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help=f"{CHECKPOINTS} Of several, the newest."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write step-N to.")],
    json: _Json = False,
) -> None:
    """Rewrite a checkpoint for another layout, e.g. --layout.tp 2 --layout.dp 4.

    Optional: every layout can load every checkpoint. A resharded one loads faster; resume with OUT as the
    run's checkpoint.url.
    """
    from myriad.train.checkpoint_tools.reshard_run import reshard_checkpoint

    overrides = OverrideCommand.of(context)
    for override in overrides:
        if not override.startswith("layout."):
            raise BadInputError(override.partition("=")[0], override.partition("=")[2], "only layout.* keys")
    with bytes_bar() as show, spinning_controlled():
        done = reshard_checkpoint(path, out, overrides, partial(show, "cutting"))
    if json:
        print_json(done)
        return
    typer.echo(f"{done['out']}: step {done['step']} in {done['ranks']} files")
