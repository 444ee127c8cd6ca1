"""If these break, a command that computes in ranks hangs or names the wrong rank when one fails, or leaves
processes or files behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watching import descendants, is_alive, wait_until

from myriad.errors import BadInputError, RunFailedError
from myriad.launchers.local_ranks import run_ranks_here

_HERE = Path(__file__).parent
_PEER = {"failed": "a connection was closed by another rank, which has ended"}


@pytest.fixture
def before() -> list[int]:
    """What other tests of this process have left, such as its tracker of shared memory."""
    return descendants()


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{_HERE}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def run(*ranks: list[Any], show: Any = lambda *progress: None) -> Any:
    request = json.dumps(dict(enumerate(ranks))).encode()
    return run_ranks_here("rank_stub", len(ranks), request, show)


def test_the_result_of_the_first_rank_ends_all_ranks_and_leaves_nothing(
    folders: Path, before: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[tuple[str, int, int]] = []
    progress = {"progress": ["computing", 1, 2]}
    said = [progress, {"warning": "on the CPU"}, {"result": [1, 2]}]
    found = run([*said, "wait"], ["wait"], show=lambda *one: shown.append(one))
    assert caplog.messages == ["on the CPU"]
    assert found == [1, 2] and shown == [("computing", 1, 2)]
    assert descendants() == before and list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([["wait"], ["kill"]], r"^rank 1 was killed by SIGKILL$"),
        ([[_PEER, "wait"], [0.2, "kill"]], r"^rank 1 was killed by SIGKILL$"),
        ([[_PEER], [0.2, {"failed": "this tensor is damaged"}]], "^rank 1: this tensor is damaged$"),
        ([["wait"], ["wait"], ["raise"]], r"^rank 2 failed: Traceback.*\n(.*\n)*ValueError: a bug$"),
        ([[], ["wait"]], "^rank 0 ended with 0$"),
    ],
    ids=["killed", "killed after its peer noticed", "failed after its peer noticed", "a bug", "no result"],
)
def test_the_rank_that_made_the_others_fail_is_named(
    ranks: list[list[Any]], expected: str, folders: Path, before: list[int]
) -> None:
    with pytest.raises(RunFailedError, match=expected):
        run(*ranks)
    assert descendants() == before and list(folders.iterdir()) == []


def test_bad_input_that_a_rank_finds_is_bad_input_of_the_command() -> None:
    refused = {"refused": ["layout.tp", 3, "a divisor"]}
    with pytest.raises(BadInputError, match=r"layout\.tp = 3: a divisor"):
        run([_PEER, "wait"], [refused, "wait"])


def test_an_interrupt_ends_all_ranks(folders: Path, before: list[int]) -> None:
    def interrupt(*progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([{"progress": ["computing", 0, 1]}, "wait"], ["wait"], show=interrupt)
    assert descendants() == before and list(folders.iterdir()) == []


def test_ranks_die_with_a_command_that_is_killed(folders: Path) -> None:
    code = (
        "import json; from myriad.launchers.local_ranks import run_ranks_here\n"
        "request = json.dumps({str(rank): [{'progress': ['', 0, 0]}, 'wait'] for rank in range(2)})\n"
        "run_ranks_here('rank_stub', 2, request.encode(), lambda *progress: print('.', flush=True))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stdout.read(4) == b".\n.\n"
    ranks = descendants(command.pid)
    assert len(ranks) == 2
    command.send_signal(signal.SIGKILL)
    command.wait()
    wait_until(lambda: not any(map(is_alive, ranks)))
    assert list(folders.iterdir()) == []
