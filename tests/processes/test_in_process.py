"""Training in the calling process, for debuggers and notebooks, gives the bits of any other run.

Two programs do all that the tests look at, as each start of Python with PyTorch takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_corpora import make_corpus

from myriad.run import Run

SETUP = """
import contextlib, json, os, signal, sys, threading
from pathlib import Path
from myriad.api import Run, train
from myriad.cli.main import build_app
from myriad.errors import BadInputError, MyriadError
from typer.testing import CliRunner

KEYS = [f"data.corpus={sys.argv[1]}", "model.vocabulary=512", "train.threads=1", "checkpoint.every=3",
        "model.prediction_layers=1", "model.mup_base_width=16", "model.layers=1", "model.hidden=32",
        "model.sequence=32", "train.global_batch=2",
        "checkpoint.memory_seconds=0"]

def children():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found += (task / "children").read_text().split()
    return found

def at_call(number, act):
    count = []
    def step():
        count.append(1)
        if len(count) == number:
            act()
    return step

def fail():
    raise ZeroDivisionError("mine")

def resumes(run):
    return [(e["step"], e["source"]) for e in run.read_events() if e["event"] == "resume"]

before, told = signal.getsignal(signal.SIGINT), {}
"""
FIRST = """
threads = threading.active_count()
try:
    train("tiny", [*KEYS, "train.steps=6", "train.device=cuda"], run="refused")
except MyriadError as error:
    told["refused"] = str(error)
command = ["train", "tiny", "--in-process", "--run", "./never"]
for keys in (["--layout.dp", "2"], ["--resilience.engine", "join"]):
    refused = CliRunner().invoke(build_app(), [*command, *keys]).exception
    told.setdefault("cannot", []).append(str(refused) if isinstance(refused, BadInputError) else "")
told["refused left"] = [signal.getsignal(signal.SIGINT) is before, threading.active_count() - threads]

interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
run = train("tiny", [*KEYS, "train.steps=6"], run="stopped", on_step=at_call(2, interrupt))
told["stopped"] = [run.last_step(), signal.getsignal(signal.SIGINT) is before]
train(run)
told["stopped"].append(run.last_step())

try:
    train("tiny", [*KEYS, "train.steps=6"], run="raised", on_step=at_call(5, fail))
except ZeroDivisionError as error:
    told["raised"] = [str(error)]
run = train(Run("raised"))
told["raised"] += [run.last_step(), resumes(run)]

run = train("tiny", [*KEYS, "train.steps=4", "layout.dp=2"], run="two")
told["two"] = [run.last_step(), run.read_events()[-1]["event"]]

try:
    train("tiny", [*KEYS, "train.steps=6"], run="failed", on_step=at_call(5, fail))
except ZeroDivisionError:
    told["failed"] = signal.getsignal(signal.SIGINT) is before
print(json.dumps(told))
"""
SECOND = """
seen = []
import myriad

def after_step():
    seen.append(children())
    myriad.log({"seen": len(seen), "twice": 1.0})
    myriad.log({"twice": 2})

run = train("tiny", [*KEYS, "train.steps=7"], run="here", on_step=after_step)
told["here"] = [run.last_step(), seen]
told["logged"] = [line.get("user") for line in run.read_metrics()]
train(Run("both"), ["train.steps=7"])
told["resumed"] = resumes(train(Run("failed")))
print(json.dumps(told))
"""


def python(folder: Path, corpus: Path, program: str) -> Any:
    """Run a program after `SETUP`, and return the JSON that it prints last."""
    words = [sys.executable, "-c", SETUP + program, str(corpus)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(folder: Path, corpus: Path) -> dict[str, Any]:
    """What the first program tells."""
    return python(folder, corpus, FIRST)


@pytest.fixture(scope="module")
def second(folder: Path, corpus: Path, first: dict[str, Any]) -> dict[str, Any]:
    """What the second program tells, after a supervised start of the run that both train."""
    keys = ["--train.steps", "4", "--train.threads", "1", "--checkpoint.every", "3", "--run", "./both"]
    keys += ["--data.corpus", str(corpus), "--model.vocabulary", "512"]
    keys += ["--model.prediction_layers", "1", "--model.mup_base_width", "16", "--model.layers", "1"]
    keys += ["--model.hidden", "32", "--model.sequence", "32", "--train.global_batch", "2"]
    command = [sys.executable, "-m", "myriad", "train", "tiny", *keys]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return python(folder, corpus, SECOND)


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.read_metrics()]


def test_a_run_has_the_same_bits_in_this_process_as_supervised_and_then_in_this_one(
    folder: Path, second: dict[str, Any]
) -> None:
    assert second["here"] == [7, [[]] * 7], "no process was started"
    here, both = Run(folder / "here"), Run(folder / "both")
    assert losses(here) == losses(both) and len(losses(here)) == 7
    assert [e["step"] for e in both.read_events() if e["event"] == "resume"] == [4]
    assert list((here.path / "spans").glob("*.parquet")), "spans are written before train returns"
    own = [None, *({"seen": float(step), "twice": 1.5} for step in range(1, 7))]
    assert second["logged"] == own, "with the line of the next step"
    assert not any("user" in line for line in both.read_metrics()), (
        "values of one run are not those of another"
    )


def test_ctrl_c_saves_and_returns_and_the_next_call_resumes(folder: Path, first: dict[str, Any]) -> None:
    assert first["stopped"] == [3, True, 6]
    events = [event["event"] for event in Run(folder / "stopped").read_events()]
    assert "interrupted" in events and "resume" in events and events[-1] == "finish"


def test_an_error_is_raised_where_it_occurs_and_the_process_can_train_again(first: dict[str, Any]) -> None:
    assert first["raised"] == ["mine", 6, [[5, "memory"]]]


def test_the_newest_step_is_stored_before_a_process_that_failed_ends(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """checkpoint.every alone would lose the fourth and the fifth step."""
    assert first["failed"], "Ctrl-C interrupts again"
    assert second["resumed"] == [[5, "storage"]]


def test_a_start_that_is_refused_leaves_the_process_as_it_was(first: dict[str, Any]) -> None:
    assert first["refused"].startswith('train.device = "cuda"') and first["refused left"] == [True, 0]


def test_several_ranks_are_trained_by_processes(first: dict[str, Any]) -> None:
    assert first["two"] == [4, "finish"]


def test_what_one_process_cannot_train_is_refused_before_anything_is_written(
    folder: Path, first: dict[str, Any]
) -> None:
    ranks, joins = first["cannot"]
    assert "layout.dp x layout.tp x layout.pp = 2: 1 to train in this process" in ranks
    assert 'resilience.engine = "join": ' in joins
    assert not (folder / "never").exists()


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, myriad; print('torch' in sys.modules, 'pydantic' in sys.modules, myriad.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "0.1.0"], done.stderr
