"""``myriad sample``: text from the newest checkpoint of a run."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from myriad.cli.progress_bar import count_bar
from myriad.cli.shared_options import CheckpointPath, UsesAverage
from myriad.cli.terminal_text import terminal_text

__all__ = ["register", "sample"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("sample")(sample)


def sample(
    run: CheckpointPath,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Sample from the likeliest tokens with this total probability."),
    ] = 0.95,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed; the same seed gives the same text.")
    ] = 1,
    ema: UsesAverage = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Continue a text with a trained model."""
    from myriad.train.checkpoint_tools.locate_checkpoint import locate

    locate(run, "run")  # This check does not import torch, so a wrong name is refused at once.
    settings = {"tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    shows_text = not as_json and sys.stdout.isatty()  # From here on the text itself shows the progress.
    with count_bar("loading the model") as show:
        pieces = _pieces(run, prompt, settings, ema=ema)
        if not shows_text:
            show("generating tokens", 0, tokens)
            pieces = _counted(pieces, lambda done: show("generating tokens", done, tokens))
            _write(run, prompt, settings, pieces, as_json=as_json)
    if shows_text:
        _write(run, prompt, settings, pieces, as_json=False)


def _pieces(run: str, prompt: str, settings: dict[str, Any], *, ema: bool) -> Iterator[str]:
    from myriad.train.checkpoint_tools.text_sampler import open_sampler

    return open_sampler(run, own_process=True, ema=ema).generate(prompt, **settings)


def _counted(pieces: Iterator[str], show: Callable[[int], None]) -> Iterator[str]:
    for number, piece in enumerate(pieces, 1):
        show(number)
        yield piece


def _write(run: str, prompt: str, settings: dict[str, Any], pieces: Iterator[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"run": run, "prompt": prompt, "text": "".join(pieces), **settings}))
        return
    shown = terminal_text if sys.stdout.isatty() else str
    sys.stdout.write(shown(prompt))
    for piece in pieces:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
