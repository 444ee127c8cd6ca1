"""What commands write, wherever it goes: pipes that close, full disks, ASCII, programs that read JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_MYRIAD = [sys.executable, "-m", "myriad.cli.main"]


def shell(folder: Path, line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    line = line.replace("myriad", " ".join(_MYRIAD))
    told = {"cwd": folder, "env": os.environ | environment, "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], timeout=120, **told)


@pytest.mark.parametrize("line", ["myriad train --help | head -1", "myriad network ecmp --help | true"])
def test_a_reader_that_leaves_ends_a_command_without_a_word(line: str, tmp_path: Path) -> None:
    assert shell(tmp_path, line).stderr == ""


def test_an_output_without_room_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = shell(tmp_path, "myriad plan tiny > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the output cannot be written: No space left on device" in done.stderr
    assert shell(tmp_path, "myriad --version >&-").returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_unicode_shows_what_it_can(encoding: str, tmp_path: Path) -> None:
    done = shell(tmp_path, "myriad plan tiny", PYTHONIOENCODING=encoding, COLUMNS="60", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, "") and "layouts" in done.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train tinny", {"key": "job", "value": "tinny", "exit_code": 2}),
        ("train tiny --layout.tp two", {"key": "layout.tp", "allowed": "must be a whole number"}),
        ("sample nowhere", {"key": "run", "exit_code": 2}),
        ("plan", {"exit_code": 2}),
        ("plam tiny", {"exit_code": 2}),
    ],
)
def test_with_json_an_error_is_one_object_on_standard_output(
    line: str, told: dict[str, object], tmp_path: Path
) -> None:
    done = shell(tmp_path, f"myriad {line} --json")
    error = json.loads(done.stdout)["error"]
    assert told.items() <= error.items() and done.returncode == error["exit_code"] == 2
    assert done.stderr == f"myriad: error: {error['message']}\n"
