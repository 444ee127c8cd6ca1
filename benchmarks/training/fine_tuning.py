"""Fine-tune the default model on instructions, and score it before and after.

    python benchmarks/training/fine_tuning.py --folder FOLDER [--steps 1500] [--svg FILE]

The instructions are made from docstrings: the user gives the head of a function, and the assistant answers
with the first sentence of its docstring. The functions are those of the Python standard library and of the
installed packages. Packages that PyTorch needs (`HELD_OUT`) are the test: the model has read none of their
functions, as the default job reads the standard library alone.

Each stage is a command as a user types it: ``train`` (the default job, if FOLDER has no run ``base``), ``data
prepare --chat-template``, ``eval``, ``train sft --init-from base``, ``eval``. A stage that has ended is not
repeated, so that an interrupted command continues.
"""

import argparse
import ast
import json
import math
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from myriad.reports.charts.loss_chart import lines_svg
from myriad.run import Run

HELD_OUT = ("networkx", "sympy", "mpmath", "jinja2", "filelock", "fsspec")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}Describe: {{ message.content }}\nAnswer: "
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
MOST_CHARACTERS = 110
"""Longest head and longest sentence that are used: both fit into a window of the default model."""
LEAST_CHARACTERS = 15
CHOICES, TESTS, TEXTS = 4, 1000, 200
TASKS = ("choice", "sentence", "exact")


@dataclass(frozen=True)
class Function:
    """The head of a function, and the first sentence of its docstring."""

    head: str
    sentence: str


def functions(folder: Path) -> Iterator[Function]:
    """Yield the documented functions of the Python files of a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & {*path.relative_to(folder).parts}:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                sentence = sentence.split(". ")[0].rstrip(".") + "."
                found = Function(f"def {node.name}({ast.unparse(node.args)})", sentence)
                if len(found.head) <= MOST_CHARACTERS and LEAST_CHARACTERS < len(sentence) <= MOST_CHARACTERS:
                    yield found


def collected() -> tuple[list[Function], list[Function]]:
    """Return the functions to train on, and those of the packages that are held out, each once."""
    packages = sorted(
        path for path in Path(sysconfig.get_paths()["purelib"]).iterdir() if (path / "__init__.py").is_file()
    )
    train = [*functions(Path(sysconfig.get_paths()["stdlib"]))]
    test: list[Function] = []
    for path in packages:
        (test if path.name in HELD_OUT else train).extend(functions(path))
    known = {one.sentence for one in train}
    unknown = [one for one in dict.fromkeys(test) if one.sentence not in known]
    return [*dict.fromkeys(train)], unknown


def prompt(one: Function) -> str:
    """Return what the template gives for the user's message."""
    return f"Describe: {one.head}\nAnswer: "


def write_tasks(folder: Path, test: Sequence[Function]) -> None:
    """Write the tasks: choose the sentence among others', predict it, and write it."""
    draw = Random(1)
    chosen = draw.sample(test, min(TESTS, len(test)))
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in TASKS}
    for one in chosen:
        others = [other for other in draw.sample(chosen, CHOICES + 1) if other.sentence != one.sentence]
        choices = [one, *others[: CHOICES - 1]]
        draw.shuffle(choices)
        pairs = [[prompt(one), choice.sentence] for choice in choices]
        lines["choice"].append({"arguments": pairs, "target": choices.index(one)})
        lines["sentence"].append({"arguments": [prompt(one), one.sentence]})
    for one in chosen[:TEXTS]:
        arguments = [prompt(one), {"until": ["\n"], "max_gen_toks": 64}]
        lines["exact"].append({"arguments": arguments, "target": one.sentence})
    kinds = dict(zip(TASKS, ("multiple_choice", "loglikelihood", "generate_until"), strict=True))
    for name, found in lines.items():
        records = [{"request_type": kinds[name], **line} for line in found]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def myriad(folder: Path, *arguments: str) -> str:
    """Run a command in the folder, and return what it prints."""
    print(f"$ myriad {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "myriad", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def prepare(folder: Path) -> None:
    """Train the default model, and write instructions and tasks, unless they are there."""
    if not (folder / "runs/base/report.html").is_file():
        myriad(folder, "train", "embedded", "--run", "runs/base")
    if not (folder / "instructions/manifest.json").is_file():
        train, test = collected()
        print(f"{len(train):,} functions to train on, {len(test):,} held out", file=sys.stderr)
        (folder / "template.jinja").write_text(TEMPLATE)
        Random(1).shuffle(train)
        chats = [
            [{"role": "user", "content": one.head}, {"role": "assistant", "content": one.sentence}]
            for one in train
        ]
        lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
        (folder / "chats.jsonl").write_text("".join(lines))
        (folder / "tasks").mkdir(exist_ok=True)
        write_tasks(folder / "tasks", test)
        options = ["--tokenizer", "runs/base", "--chat-template", "template.jinja", "--validation", "0.02"]
        myriad(folder, "data", "prepare", "chats.jsonl", "--output", "instructions", *options)


def fine_tune(folder: Path, steps: int, rate: float) -> Path:
    """Train on the instructions, unless that run has ended, and return its path."""
    name = f"runs/tuned-{steps}-{rate:g}"
    every = str(max(1, steps // 10))
    keys = {
        "data.corpus": "instructions",
        "model.sequence": "128",
        "train.steps": str(steps),
        "train.global_batch": "16",
        "layout.micro_batch": "8",
        "optimizer.learning_rate": f"{rate:g}",
        "optimizer.warmup_steps": str(steps // 40),
        "train.validate_every": every,
        "eval.tasks": "tasks/choice.jsonl",
        "eval.every": every,
        "eval.limit": "300",
    }
    if not (folder / name / "report.html").is_file():
        options = [part for key, value in keys.items() for part in (f"--{key}", value)]
        myriad(folder, "train", "sft", "--run", name, "--init-from", "runs/base", *options)
    return folder / name


def scores(folder: Path, run: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return value and standard error of each score of a run."""
    path = folder / f"scores-{Path(run).name}.json"
    if not path.is_file():
        path.write_text(myriad(folder, "eval", run, "--tasks", "tasks", "--json"))
    found = json.loads(path.read_text())["tasks"]
    return {(task["task"], name): score for task in found for name, score in task["scores"].items()}


def print_table(folder: Path, runs: Sequence[str]) -> None:
    """Print a row for each score, with the likelihood of the right sentences in bits per byte."""
    before, after = (scores(folder, run) for run in runs)
    sentences = [json.loads(line)["arguments"][1] for line in (folder / "tasks/sentence.jsonl").open()]
    bits = [
        math.log2(found["sentence", "perplexity"]["value"])
        * len(sentences)
        / len("".join(sentences).encode())
        for found in (before, after)
    ]
    print("| score | before | after |")
    print("|---|---|---|")
    print(f"| right sentences, bits per byte | {bits[0]:.3f} | {bits[1]:.3f} |")
    for key in (("choice", "acc"), ("choice", "acc_norm"), ("exact", "exact_match")):
        cells = [
            f"{found[key]['value']:.3f} ± {found[key]['standard_error']:.3f}" for found in (before, after)
        ]
        print(f"| {' '.join(key)} | {cells[0]} | {cells[1]} |")


def draw(run: Path, path: Path) -> None:
    """Draw the share of right choices and the validation loss over the steps."""
    events = [*Run(run).read_events()]
    validation = [(float(one["step"]), one["loss"]) for one in events if one["event"] == "validation"]
    path.write_text(lines_svg({"loss of held-out answers": validation}, "Fine-tuning on docstrings", "step"))


def main() -> None:
    """Run every stage, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="runs, corpus and tasks are kept here")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--svg", type=Path, help="draw the validation loss into this file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    tuned = fine_tune(options.folder, options.steps, options.rate)
    print_table(options.folder, ["runs/base", f"runs/{tuned.name}"])
    if options.svg:
        draw(tuned, options.svg)


if __name__ == "__main__":
    main()
