"""Write docs/reference from the code: job keys, commands, events, metrics, run folder and Python interface.

    python scripts/reference_docs.py            write the pages
    python scripts/reference_docs.py --check    exit 1, and name the pages that differ

The pages are kept in the repository, where they can be read without building the site; a test runs the check.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from family_table import family_rows
from pydantic import BaseModel

from myriad import api
from myriad.checkpoint.foreign.hugging_face_config import MODEL_TYPES, family_of, kind_of
from myriad.cli.main import build_app
from myriad.config import read_help
from myriad.errors import BadInputError
from myriad.job import RENAMED_KEYS, RENAMED_VALUES, Job, job_keys, load_job, recipe_names
from myriad.run import event_text, run_lines
from myriad.run import run_folder as run_module

_FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_SAMPLES: dict[str, object] = {
    "null": None,
    "-1": -1,
    "0": 0,
    "a whole number": 3,
    "a number": 1.5,
    "text": "text",
    "a list of text": ["text"],
    "a list of whole numbers": [3],
    "a list of objects": [{}],
    "an object of numbers": {"key": 1.5},
    "an object of pairs": {"key": [1, 2]},
    "an object": {"key": "value"},
}
"""Values that show what a field of an event accepts."""
_NOTE = "<!-- Written by scripts/reference_docs.py; do not edit. -->\n"


def main(arguments: list[str]) -> int:
    """Write or check all pages; return the exit code."""
    wrong = []
    for name, text in pages().items():
        path = _FOLDER / name
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            wrong.append(name)
    for name in wrong:
        print(f"docs/reference/{name} differs from the code: run python scripts/reference_docs.py")
    return 1 if wrong else 0


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    makers = {
        "job-keys.md": _job_keys,
        "commands.md": _commands,
        "events.md": _events,
        "metrics.md": _metrics,
        "run-folder.md": _run_folder,
        "python.md": _python,
        "models.md": _models,
    }
    return {name: _NOTE + "\n".join(make()).rstrip() + "\n" for name, make in makers.items()}


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _value(value: Any) -> str:
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _job_keys() -> Iterator[str]:
    yield "# Job keys"
    yield ""
    yield "Every key of a job file. On the command line a key is an option: `--layout.tp 2`. `off` disables"
    yield 'an optional key. Sizes may be written `"64 MiB"`, rates `"100 Gbit/s"`.'
    read_help(Job)
    section = None
    for key, field in job_keys():
        name = key.rpartition(".")[0]
        if name != section:
            section = name
            yield from ("", f"## {f'[{name}]' if name else 'Top level'}", "")
            yield from ((_cell(_section_help(Job, name)), "") if name else ())
            yield from ("| key | default | meaning |", "|---|---|---|")
        yield f"| `{key}` | `{_value(field.default)}` | {_cell(field.description or '')} |"
    yield from ("", "## Former names", "", "Accepted until the next release, with a line.", "")
    yield from ("| former name | name |", "|---|---|")
    for old, new in RENAMED_KEYS.items():
        yield f"| `{old}` | `{new}` |"
    for key, values in RENAMED_VALUES.items():
        for old, new in values.items():
            yield f"| `{key} = {old}` | `{key} = {new}` |"


def _models() -> Iterator[str]:
    recipes = []
    for name in recipe_names("models"):
        with contextlib.suppress(BadInputError):
            kind_of(load_job("tiny", [f"model={name}"]).model)
            recipes.append(name)
    yield "# Model families"
    yield ""
    yield "Families that are exchanged with Hugging Face, by the `model_type` of `config.json`. A cell says"
    yield "what `pytest tests/processes/test_hugging_face.py` compares for the family, and is read from it:"
    yield ""
    yield "- import: a model of transformers' class gives its logits here, and the same likeliest tokens."
    yield "- export: a model from here gives its logits in transformers' class."
    yield "- logits: the largest difference that either test accepts, in float32."
    yield "- bits: weights that are exported and imported are equal bit by bit."
    yield "- tp: two tensor-parallel ranks read about half of the folder each, and give transformers' loss"
    yield "  to 1e-5. Every family trains in any layout; `layout.tp` divides the heads."
    yield ""
    yield "transformers has no class for `minicpm`: the test compares with a reference of its own, written"
    yield "after the model's published code, and with transformers' Granite, which computes the same."
    yield ""
    yield 'A recipe\'s name is a model (`model = "qwen3-8b"`) and a job (`myriad plan qwen3-8b`). A model is'
    yield "exported as the first type that computes the same; `--model-type` asks for another."
    yield ""
    yield from family_rows({kind: family_of(kind).architecture for kind in MODEL_TYPES}, recipes)


def _section_help(config: type[BaseModel], section: str) -> str:
    first, _, rest = section.partition(".")
    field = config.model_fields[first]
    if rest and isinstance(field.annotation, type):
        return _section_help(field.annotation, rest)
    return field.description or ""


def _commands() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield "Every command has `--help` and `--json`. Exit codes: 0 done, 1 the run failed, 2 bad input"
    yield "(nothing was changed), 130 stopped by Ctrl-C or SIGTERM."
    root: Any = typer.main.get_command(build_app())
    for name, command in sorted(root.commands.items()):
        yield from _command(f"myriad {name}", command, 2)


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {name}", "")
    yield from inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "").splitlines()
    rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield from ("", "| option | meaning |", "|---|---|", *rows)
    for part, child in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{name} {part}", child, level + 1)


def _parameter(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    words = parameter.metavar or str(parameter.name).upper() if is_argument else ""
    named = words or ", ".join(parameter.opts)
    default = parameter.default
    shown = "" if callable(default) or default in (None, False, (), []) else f" Default: {_value(default)}."
    return f"| `{named}` | {_cell(getattr(parameter, 'help', None) or '')}{shown} |"


def _events() -> Iterator[str]:
    yield "# Events"
    yield ""
    yield "A line of `events.jsonl` is a JSON object with `time` (seconds since the epoch), `event` (a kind)"
    yield "and fields of that kind; `step` is the step that it concerns. The page, `myriad top` and alarms"
    yield "describe these kinds:"
    yield ""
    yield from (f"- `{kind}`" for kind in sorted(event_text.SENTENCES))
    yield ""
    yield "Fields that programs read, and what they hold:"
    yield from ("", "| field | accepts |", "|---|---|")
    for field, check in sorted(run_lines.EVENT_FIELDS.items()):
        accepted = [kind for kind, value in _SAMPLES.items() if check(value)]
        yield f"| `{field}` | {', '.join(accepted)} |"


def _metrics() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "A line of `metrics.jsonl` is a JSON object for one step:"
    yield from ("", "| field | meaning |", "|---|---|")
    for field, meaning in run_lines.STEP_FIELDS.items():
        yield f"| `{field}` | {_cell(meaning)} |"


def _run_folder() -> Iterator[str]:
    yield "# The run folder"
    yield ""
    yield from inspect.cleandoc(run_module.__doc__ or "").splitlines()


def _python() -> Iterator[str]:
    yield "# Python"
    yield ""
    yield from inspect.cleandoc(api.__doc__ or "").splitlines()
    for name in sorted(api.__all__):
        thing = getattr(api, name)
        yield from ("", f"## {name}", "")
        if inspect.isfunction(thing):
            yield from ("```python", f"{name}{inspect.signature(thing)}", "```", "")
        yield from (inspect.getdoc(thing) or "").splitlines()
        if name == "Run":
            yield from _methods(thing)


def _methods(thing: type) -> Iterator[str]:
    yield from ("", "| method | meaning |", "|---|---|")
    for name, method in inspect.getmembers(thing):
        if name.startswith("_") or not (inspect.isfunction(method) or isinstance(method, property)):
            continue
        text = (inspect.getdoc(method) or "").partition("\n\n")[0]
        shown = name if isinstance(method, property) else f"{name}()"
        yield f"| `{shown}` | {_cell(text)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
