"""Ctrl-C and SIGTERM on real commands in process groups of their own, as a terminal sends them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from watching import wait_until

from myriad.cli.main import build_app
from myriad.run import Run
from myriad.system.jsonl import Record

_MYRIAD = [sys.executable, "-m", "myriad.cli.main"]
_TINY = (
    "train", "tiny", "--run", "./run", "--train.threads", "1",
    "--model.layers", "1", "--model.hidden", "32", "--model.sequence", "32",
)  # fmt: skip


def _hear_ctrl_c() -> None:
    """As in a terminal: a shell's background job, which these tests may be, ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Command:
    """A command whose process group can be signalled, and whose processes can be found afterwards."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*_MYRIAD, *words],
            cwd=folder,
            env=os.environ | {"MYRIAD_TEST_MARK": self._mark} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> str:
        """What it has printed; it was interrupted, and nothing but a snapshot server is left of it."""
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 130, output
        assert "Traceback" not in output and "Exception ignored" not in output
        wait_until(lambda: not self._left())
        return output

    def _left(self) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return [line for line in found if "snapshot_server" not in line]


def events(folder: Path, name: str) -> list[Record]:
    run = Run(folder / "run")
    return [event for event in run.read_events() if event["event"] == name]


def steps_done(folder: Path) -> int:
    return len(Run(folder / "run").read_metrics())


def has_done(folder: Path, step: int, start: int) -> bool:
    """Whether the given start of the run has trained a step."""
    starts, lines = events(folder, "start"), Run(folder / "run").read_metrics()
    return len(starts) == start and lines[-1]["step"] == step and lines[-1]["time"] > starts[-1]["time"]


def test_ctrl_c_twice_ends_with_130_and_names_the_step_that_the_next_start_continues_from(
    tmp_path: Path,
) -> None:
    """The next start is stopped during the validation after its last step, for whose end it does not wait;
    the one after that has no steps left, and is stopped, too."""
    command = Command(tmp_path, *_TINY, "--train.steps", "100000", "--checkpoint.every", "20")
    wait_until(lambda: steps_done(tmp_path) > 25)
    command.signal()
    time.sleep(0.05)
    command.signal()
    output = command.end()
    assert "saving a checkpoint after the current step; press Ctrl-C again to stop without saving" in output
    named = re.search(r"stopped at step (\d+).*resumes from there", output)
    assert named is not None, output
    first = int(named[1])
    listed = CliRunner().invoke(build_app(), ["checkpoint", "list", str(tmp_path / "run"), "--json"])
    assert max(row["step"] for row in json.loads(listed.stdout)["checkpoints"]) == first

    last = first + 2 - first % 2
    long = ("--data.validation_batches", "100000", "--train.validate_every", "2")
    again = Command(tmp_path, "train", "./run", *long, "--train.steps", str(last))
    wait_until(lambda: has_done(tmp_path, last, start=2))
    again.signal(signal.SIGTERM)
    assert f"stopped at step {last};" in again.end(), "the last step is saved, but the run is not finished"
    assert events(tmp_path, "resume")[0]["step"] == first
    assert not events(tmp_path, "validation")

    third = Command(tmp_path, "train", "./run")
    wait_until(lambda: len(events(tmp_path, "start")) == 3)
    third.signal()
    assert f"stopped at step {last};" in third.end()
    stops = [event["step"] for event in events(tmp_path, "interrupted")]
    # the first save may end before the second signal arrives
    assert stops[-2:] == [last, last] and stops[:-2] in ([], [first])


def _imports(command: Command, folder: Path) -> None:
    maps = Path(f"/proc/{command.process.pid}/maps")
    wait_until(lambda: "numpy" in maps.read_text() or "pydantic" in maps.read_text())


def _computes(command: Command, folder: Path) -> None:
    time.sleep(2.0)


def _drives(command: Command, folder: Path) -> None:
    wait_until(lambda: [*folder.rglob("driver.json")] != [])


_TEXTS = sys.prefix + "/lib/*/site-packages/torch/**/*.py"
_ANY = pytest.mark.parametrize(
    ("words", "when"),
    [
        (("train", "tiny"), _imports),
        (("validate",), _imports),
        (("data", "prepare", _TEXTS, "--output", "out"), _computes),
        (("faults", "run", "kill-rank"), _drives),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)


@_ANY
def test_ctrl_c_ends_any_command_in_a_line(
    words: tuple[str, ...], when: Callable[[Command, Path], None], tmp_path: Path
) -> None:
    command = Command(tmp_path, *words)
    when(command, tmp_path)
    command.signal()
    lines = command.end().splitlines()
    assert "interrupted" in lines[-1] or "stopped" in lines[-1], lines
