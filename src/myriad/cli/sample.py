"""``myriad sample``: text from the newest checkpoint of a run."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from myriad.cli.bars import count_bar
from myriad.cli.runs import existing_run

__all__ = ["register", "sample"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("sample")(sample)


def sample(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 always takes the likeliest token; 1 draws as the model believes.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that make up this share.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Continue a text with a trained model."""
    path = existing_run(run)
    settings = {"tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    shows_text = not as_json and sys.stdout.isatty()  # then the text itself is the progress
    with count_bar("loading the model") as show:
        pieces = _pieces(path, prompt, settings)
        if not shows_text:
            show("generating tokens", 0, tokens)
            pieces = _counted(pieces, lambda done: show("generating tokens", done, tokens))
            _write(path, prompt, settings, pieces, as_json=as_json)
    if shows_text:
        _write(path, prompt, settings, pieces, as_json=False)


def _pieces(path: Path, prompt: str, settings: dict[str, Any]) -> Iterator[str]:
    from myriad.run import Run
    from myriad.train.sample import open_run, settle_threads

    run = Run(path)
    settle_threads(run.job().model.num_parameters())
    return open_run(run).generate(prompt, **settings)


def _counted(pieces: Iterator[str], show: Callable[[int], None]) -> Iterator[str]:
    for number, piece in enumerate(pieces, 1):
        show(number)
        yield piece


def _write(
    path: Path, prompt: str, settings: dict[str, Any], pieces: Iterator[str], *, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps({"run": str(path), "prompt": prompt, "text": "".join(pieces), **settings}))
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
