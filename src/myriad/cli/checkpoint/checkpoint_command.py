"""``myriad checkpoint``: list, verify, sign, compare, remove, store and convert the checkpoints of a run."""

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.progress_bar import bytes_bar
from myriad.cli.shared_options import CHECKPOINTS, AsJson, CheckpointPath, RunName, UsesAverage
from myriad.cli.terminal_text import terminal_text
from myriad.errors import BadInputError
from myriad.run import existing_run
from myriad.system.spin_control import spinning_controlled
from myriad.units import format_bytes

__all__ = ["register"]

_Path = Annotated[str, typer.Argument(metavar="PATH", help=CHECKPOINTS)]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    text = (
        "Manage checkpoints: list, verify, sign, diff, prune, reshard, save; export to and import from other "
        "systems."
    )
    verb = typer.Typer(no_args_is_help=True, help=text)
    verb.command("list")(_list)
    verb.command("verify")(_verify)
    verb.command("sign")(_sign)
    verb.command("diff")(_diff)
    verb.command("prune")(_prune)
    verb.command("save")(_save)
    verb.command("release")(_release)
    _register_conversions(verb)
    app.add_typer(verb, name="checkpoint")


def _list(
    path: _Path,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte instead of comparing sizes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List checkpoints: step, time, size, location, and whether they are complete.

    For a run it also lists the steps in this machine's memory. "held": the run ended and could not store that
    step; see `save` and `release`."""
    from myriad.checkpoint.storage.checkpoint_list import list_checkpoint, list_checkpoints
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    found = locate(path)
    if found.one is not None:
        rows = [list_checkpoint(found.one, every_byte=verify)]
    else:
        rows = list_checkpoints(found.run if found.is_run else None, found.whole_folder(), every_byte=verify)
    if json:
        print_json({"run": path, "checkpoints": rows})
    else:
        _show_rows(path, rows)


def _show_rows(run: str, rows: Sequence[dict[str, Any]]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table

    if not rows:
        typer.echo(f"{run}: no checkpoint yet")
        return
    table = Table("step", "saved", "size", "tier", "state", box=None, header_style="bold")
    for row in rows:
        saved = "" if row["time"] is None else f"{datetime.fromtimestamp(row['time']):%Y-%m-%d %H:%M:%S}"
        size = "" if row["bytes"] is None else format_bytes(row["bytes"])
        table.add_row(str(row["step"]), saved, size, row["tier"], row["state"])
    Console().print(table)
    for problem in (problem for row in rows for problem in row["problems"]):
        typer.echo(terminal_text(problem))


def _verify(
    path: _Path,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYFILE",
            help="Check each signature, too: an Ed25519 key in PEM (public is enough), or the secret it was "
            "signed with. PATH may then be a signed folder of another format.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Read every byte and list damaged chunks; exit code 1 if there are any.

    The hashes of a checkpoint find damage. With --key, files that the owner of the key has not signed are
    problems as well."""
    from myriad.checkpoint.storage.checkpoint_folder import is_removed, open_checkpoint, verify
    from myriad.checkpoint.storage.signature import check_signature, is_signed_export, load_key
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    known = None if key is None else load_key(key, "--key")
    found: dict[str, list[str]] = {}
    if known is not None and is_signed_export(path):
        export = open_checkpoint(path)
        found[export.where] = check_signature(export, known)
    else:
        place = locate(path)
        for checkpoint in place.checkpoints():
            with bytes_bar() as show:
                problems = verify(checkpoint, show=partial(show, checkpoint.name))
            problems += [] if known is None else check_signature(checkpoint, known)
            # A removed checkpoint was pruned in the meantime.
            if not (problems and place.one is None and is_removed(checkpoint)):
                found[checkpoint.where] = problems
    if json:
        print_json({"path": path, "whole": not any(found.values()), "problems": found})
    else:
        whole = "whole" if known is None else f"whole, signed with the key {known.key_id}"
        for checkpoint_path, problems in found.items():
            typer.echo(terminal_text("\n".join(problems)) if problems else f"{checkpoint_path}: {whole}")
        if not found:
            typer.echo(f"{path}: no checkpoint yet")
    if any(found.values()):
        raise typer.Exit(1)


def _sign(
    path: CheckpointPath,
    key: Annotated[
        Path,
        typer.Option(
            metavar="KEYFILE",
            help="Private Ed25519 key in PEM (openssl genpkey -algorithm ed25519), or a secret of at least "
            "32 bytes, such as RUN/secret.",
        ),
    ],
    json: AsJson = False,
) -> None:
    """Sign all files of a checkpoint, for `verify --key` and `import --key`.

    The checkpoint is verified first. The signature is signature.json beside the manifest."""
    from myriad.checkpoint.storage.signature import load_signing_key, sign
    from myriad.train.checkpoint_tools.locate_checkpoint import locate, newest_whole

    known = load_signing_key(key, "--key")
    checkpoint = newest_whole(locate(path), every_byte=True)
    files = sign(checkpoint, known)
    if json:
        print_json({"path": checkpoint.where, "key": known.key_id, "files": files})
    else:
        typer.echo(f"{checkpoint.where}: {files} files signed with the key {known.key_id}")


def _diff(first: CheckpointPath, second: CheckpointPath, json: AsJson = False) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if any differ."""
    from myriad.train.checkpoint_tools.locate_checkpoint import locate, newest_whole

    paths = [newest_whole(locate(path), every_byte=False) for path in (first, second)]
    from myriad.checkpoint.checkpoint_files import compare_checkpoints

    where = [path.where for path in paths]
    with spinning_controlled():
        found = list(compare_checkpoints(*where))
    if json:
        print_json({"paths": where, "differences": [asdict(one) for one in found]})
    else:
        lines = [
            f"{one.name}: {one.what or f'up to {one.largest:.3g} ({one.relative:.1e} of the largest)'}"
            for one in found
        ]
        typer.echo("\n".join(lines) or f"{where[0]} and {where[1]}: equal bits")
    if found:
        raise typer.Exit(1)


def _prune(
    path: _Path,
    keep: Annotated[int, typer.Option(help="Number of newest checkpoints to keep.", min=1)],
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Remove checkpoints older than this even if fewer are kept.", min=0
        ),
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", help="Remove checkpoints as well that a load found damaged and set aside."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Remove all but the newest checkpoints; the newest complete one always stays."""
    from myriad.run import Run
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    found = locate(path)
    folder = found.whole_folder()
    with contextlib.nullcontext() if found.run is None else Run(found.run).lock():
        newest = folder.newest()
        age = None if older_than is None else older_than * 86400
        removed = folder.prune(keep, newest[0], age) if newest else []
        removed += folder.remove_damaged() if damaged else []
    if json:
        print_json({"run": path, "removed": removed, "kept": folder.steps()})
    else:
        typer.echo(f"removed {len(removed)}, kept {', '.join(map(str, folder.steps())) or 'none'}")


def _save(
    run: RunName,
    to: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Folder or URL without checkpoints. Default: the run's own."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Store the newest step of an ended run that this machine holds in memory.

    A run whose last checkpoint could not be stored (a full disk) ends, and its snapshot servers hold the
    state in memory until it is stored, released, or the machine goes down. This command stores it in PLACE,
    verifies it, and releases the memory. Resume with: myriad train RUN --checkpoint.url PLACE. With several
    nodes, run it on the node of rank 0; PLACE must be reachable from all nodes.
    """
    from myriad.train.checkpoint_tools.memory_rescue import save_from_memory

    done = save_from_memory(existing_run(run), to)
    if json:
        print_json(done)
        return
    typer.echo(f"step {done['step']} is stored and verified: {done['where']} ({format_bytes(done['bytes'])})")
    url = "" if to is None else f" --checkpoint.url {shlex.quote(done['url'])}"
    typer.echo(f"resume with: myriad train {shlex.quote(run)}{url}")


def _release(run: RunName, json: AsJson = False) -> None:
    """Discard the unstored steps that an ended run holds in this machine's memory."""
    from myriad.train.checkpoint_tools.memory_rescue import release_memory

    steps = release_memory(existing_run(run))
    if json:
        print_json({"run": run, "released": steps})
    else:
        typer.echo(
            f"released from memory: step {', '.join(map(str, steps))}" if steps else "nothing was in memory"
        )


class _Format(StrEnum):
    hf = "hf"


class _Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _register_conversions(verb: typer.Typer) -> None:
    """Add export, import and reshard to ``myriad checkpoint``."""
    verb.command("export")(_export)
    verb.command("import")(_import)
    verb.command("reshard", cls=OverrideCommand, options_metavar="[OPTIONS] [--layout.KEY VALUE]...")(
        _reshard
    )


def _export(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder: new or empty.")],
    format: Annotated[
        _Format, typer.Option(help="hf: Hugging Face format, for transformers' from_pretrained.")
    ] = _Format.hf,
    dtype: Annotated[_Dtype, typer.Option(help="Data type of the written weights.")] = _Dtype.float32,
    model_type: Annotated[
        str | None,
        typer.Option(
            help="Model type in config.json, such as qwen3. Default: the first that fits the model."
        ),
    ] = None,
    ema: UsesAverage = False,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYFILE",
            help="Sign the written files: private Ed25519 key in PEM, or a secret of at least 32 bytes. "
            "Default: no signature.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a checkpoint for other tools, as a model of a family that transformers has.

    A model with another architecture is refused; nothing is written then."""
    from myriad.checkpoint.storage.signature import load_signing_key

    key = None if sign is None else load_signing_key(sign, "--sign")
    from myriad.train.checkpoint_tools.foreign_checkpoints import export_hugging_face

    with spinning_controlled():
        done = export_hugging_face(path, out, dtype.value, model_type, key, ema=ema)
    if json:
        print_json(done)
        return
    of = "parameters, moving average," if ema else "parameters"
    typer.echo(f"{out}: {done['model_type']}, {done['parameters']:,} {of} in {done['dtype']}")
    for key_value in done["left_out"]:
        typer.echo(f"left out: the weights of {key_value}, for which Hugging Face has no model class")
    if key is not None:
        typer.echo(f"signed with the key {key.key_id}")
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
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYFILE",
            help="Refuse files that are not signed with this key: Ed25519 in PEM (public is enough), or a "
            "secret. Default: signatures are not read.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a run from another system's checkpoint, to sample from or to train further.

    Imports the optimizer state of Megatron-LM and DeepSpeed: training resumes at the next iteration. Code in
    the files is never run.
    """
    if key is not None:
        from myriad.checkpoint.storage.signature import load_key, require_signature

        require_signature(folder, load_key(key, "--key"), "CHECKPOINT")
        config = config or _signed_config(folder)
    from myriad.train.checkpoint_tools.foreign_checkpoints import import_foreign, is_foreign

    with spinning_controlled():
        if is_foreign(folder):
            done = import_foreign(folder, run, config=config, weights_only=weights_only)
        else:
            from myriad.train.checkpoint_tools.foreign_checkpoints import import_hugging_face

            done = import_hugging_face(folder, run)
    if json:
        print_json(done)
    elif "system" in done:
        _show_foreign(run, done)
    else:
        _show_hugging_face(run, done)


def _signed_config(folder: Path) -> Path:
    """Return config.json in a signed folder, so that none beside the folder, which is not signed, is read."""
    own = folder / "config.json"
    return own if own.is_file() else next(folder.glob("*/config.json"), own)


def _show_hugging_face(run: Path, done: Mapping[str, Any]) -> None:
    tokenizer = "with its tokenizer" if done["tokenizer"] else "without a tokenizer: no text can be made"
    typer.echo(f"{run}: {done['parameters']:,} parameters, {tokenizer}")
    if done["other_end"]:
        typer.echo(f"note: {done['other_end']}")
    for why in done["left_out"]:
        typer.echo(f"left out: the prediction layers of {why}")
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
    path: CheckpointPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write step-N to.")],
    json: AsJson = False,
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
