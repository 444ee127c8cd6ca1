"""Training in the calling process, for debuggers and notebooks, gives the bits of any other run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_corpora import make_corpus

from myriad.run import Run

SETUP = """
import json, os, signal, sys
from pathlib import Path
from myriad.api import Run, train

KEYS = [f"data.corpus={sys.argv[1]}", "model.vocabulary=512", "train.threads=1", "checkpoint.every=3",
        "model.prediction_layers=1", "model.mup_base_width=16",
        "checkpoint.memory_seconds=0"]

def children():
    tasks = Path("/proc/self/task").iterdir()
    return [pid for task in tasks for pid in (task / "children").read_text().split()]
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


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.read_metrics()]


def test_a_run_has_the_same_bits_in_this_process_supervised_and_across_both(
    tmp_path: Path, corpus: Path
) -> None:
    program = """
seen = []
run = train("tiny", [*KEYS, "train.steps=7"], run="here", on_step=lambda: seen.append(children()))
train("tiny", [*KEYS, "train.steps=4"], run="both")
print(json.dumps([run.last_step(), seen]))
"""
    last_step, children = python(tmp_path, corpus, program)
    assert last_step == 7 and children == [[]] * 7, "no process was started"
    for name in ("supervised", "both"):
        keys = ["--train.steps", "7", "--train.threads", "1", "--checkpoint.every", "3"]
        keys += ["--data.corpus", str(corpus), "--model.vocabulary", "512", "--run", str(tmp_path / name)]
        keys += ["--model.prediction_layers", "1", "--model.mup_base_width", "16"]
        command = [
            sys.executable,
            "-m",
            "myriad",
            "train",
            *(["both"] if name == "both" else ["tiny", *keys]),
        ]
        if name == "both":
            command += ["--train.steps", "7"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    here, supervised, both = (Run(tmp_path / name) for name in ("here", "supervised", "both"))
    assert losses(here) == losses(supervised) == losses(both) and len(losses(here)) == 7
    assert [e["step"] for e in both.read_events() if e["event"] == "resume"] == [4]
    assert list((here.path / "spans").glob("*.parquet")), "spans are written before train returns"


def test_ctrl_c_saves_and_returns_and_the_next_call_resumes(tmp_path: Path, corpus: Path) -> None:
    program = """
before = signal.getsignal(signal.SIGINT)
count = []

def stop():
    count.append(1)
    if len(count) == 2:
        os.kill(os.getpid(), signal.SIGINT)

run = train("tiny", [*KEYS, "train.steps=6"], run="one", on_step=stop)
first = run.last_step(), signal.getsignal(signal.SIGINT) is before
train(run)
print(json.dumps([*first, run.last_step()]))
"""
    stopped_at, restored, finished_at = python(tmp_path, corpus, program)
    assert stopped_at == 3 and restored and finished_at == 6
    events = [event["event"] for event in Run(tmp_path / "one").read_events()]
    assert "interrupted" in events and "resume" in events and events[-1] == "finish"


def test_an_error_is_raised_where_it_occurs_and_the_process_can_train_again(
    tmp_path: Path, corpus: Path
) -> None:
    program = """
count = []

def fail():
    count.append(1)
    if len(count) == 5:
        raise ZeroDivisionError("mine")

try:
    train("tiny", [*KEYS, "train.steps=6"], run="one", on_step=fail)
except ZeroDivisionError as error:
    said = str(error)
run = train(Run("one"))
print(json.dumps([said, run.last_step(), [e["step"] for e in run.read_events() if e["event"] == "resume"]]))
"""
    said, last_step, resumed = python(tmp_path, corpus, program)
    assert said == "mine" and last_step == 6 and resumed == [5], "from memory"


def test_the_newest_step_is_stored_before_a_process_that_failed_ends(tmp_path: Path, corpus: Path) -> None:
    """checkpoint.every alone would lose the fourth and the fifth step."""
    failing = """
before, count = signal.getsignal(signal.SIGINT), []

def fail():
    count.append(1)
    if len(count) == 5:
        raise ZeroDivisionError("mine")

try:
    train("tiny", [*KEYS, "train.steps=6"], run="one", on_step=fail)
except ZeroDivisionError:
    print(json.dumps(signal.getsignal(signal.SIGINT) is before))
"""
    assert python(tmp_path, corpus, failing), "Ctrl-C interrupts again"
    resuming = """
run = train(Run("one"))
print(json.dumps([(e["step"], e["source"]) for e in run.read_events() if e["event"] == "resume"]))
"""
    assert python(tmp_path, corpus, resuming) == [[5, "storage"]]


def test_a_start_that_is_refused_leaves_the_process_as_it_was(tmp_path: Path, corpus: Path) -> None:
    program = """
import threading
from myriad.errors import MyriadError

before, threads = signal.getsignal(signal.SIGINT), threading.active_count()
try:
    train("tiny", [*KEYS, "train.steps=6", "train.device=cuda"], run="one")
except MyriadError as error:
    said = str(error)
is_restored = signal.getsignal(signal.SIGINT) is before
print(json.dumps([said, is_restored, threading.active_count() - threads]))
"""
    said, handler_is_restored, more_threads = python(tmp_path, corpus, program)
    assert said.startswith("train.device = 'cuda'") and handler_is_restored and more_threads == 0


def test_several_ranks_are_trained_by_processes(tmp_path: Path, corpus: Path) -> None:
    program = """
run = train("tiny", [*KEYS, "train.steps=4", "layout.dp=2"], run="two")
print(json.dumps([run.last_step(), run.read_events()[-1]["event"]]))
"""
    assert python(tmp_path, corpus, program) == [4, "finish"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["--layout.dp", "2"], "layout.dp x layout.tp x layout.pp = 2: 1 to train in this process"),
        (["--resilience.engine", "join"], "resilience.engine = 'join': "),
    ],
)
def test_what_one_process_cannot_train_is_refused_before_anything_is_written(
    keys: list[str], says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "myriad", "train", "tiny", "--in-process", *keys]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_importing_the_package_imports_no_torch() -> None:
    program = (
        "import sys, myriad; print('torch' in sys.modules, 'pydantic' in sys.modules, myriad.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "0.1.0"], done.stderr
