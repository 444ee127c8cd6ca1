"""Communication that cannot be: told before anything starts, by the command line and by ranks that another
launcher starts. Communication that stops: told in one line, and nothing is left running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_corpora import make_corpus
from watching import process_of

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import RunFailedError
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run


def run_python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, cwd=folder
    )


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            "--overlap.max_in_flight_bytes 1 MiB",
            "overlap.max_in_flight_bytes = 1048576: at least overlap.message_bytes = 4194304 bytes",
        ),
        ("--overlap.chunks 0", "overlap.chunks = 0: must be at least 1"),
        ("--comm.network_bandwidth fast", 'comm.network_bandwidth = "fast": '),
        (
            "--comm.compress_gradients int4",
            'comm.compress_gradients = "int4": must be "bfloat16" or "int8"',
        ),
        ("--comm.hierarchy switch", 'comm.hierarchy = "switch": needs comm.switch_size'),
        ("--comm.node_size 2", "comm.node_size = 2: must divide the 1 ranks"),
        ("--comm.sync_every 4 --layout.zero 1", "comm.sync_every = 4: needs layout.zero = 0"),
    ],
)
def test_the_command_line_reports_it_in_one_line_and_leaves_no_trace(
    tmp_path: Path, keys: str, told: str
) -> None:
    arguments = keys.replace("1 MiB", "1MiB").split()
    done = run_python(tmp_path, "myriad.cli.main", "train", "tiny", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"myriad: error: {told}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_its_files_when_its_communication_is_made_impossible(tmp_path: Path) -> None:
    Run(tmp_path / "runs" / "tiny").create_or_resume(load_job("tiny"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = run_python(tmp_path, "myriad.cli.main", "train", "runs/tiny", "--overlap.message_bytes", "0")
    assert done.returncode == 2 and done.stderr.startswith("myriad: error: overlap.message_bytes = 0: ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_ranks_that_another_launcher_starts_report_it_too(tmp_path: Path) -> None:
    """A job file that was edited by hand reaches the ranks unchecked."""
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny"))
    text = run.job_path.read_text()
    assert "\nmax_in_flight_bytes = 16777216\n" in text
    run.job_path.write_text(text.replace("\nmax_in_flight_bytes = 16777216\n", "\nmax_in_flight_bytes = 3\n"))
    done = run_python(tmp_path, "myriad.train.worker", "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    said = 'myriad: error: run = "run/job.toml": has overlap.max_in_flight_bytes = 3: at least overlap.'
    assert done.stderr.startswith(said)
    assert {path.name for path in run.path.iterdir()} == {"job.toml", "logs", "checkpoints"}


class _Freeze:
    """Watches a run as the launcher's screen does, and stops rank 1 dead (SIGSTOP) at a step."""

    def __init__(self, run: Run, step: int) -> None:
        self._run, self._step = run, step
        self.pids: dict[int, int] = {}
        """Process of each rank, once it has been done."""

    def tick(self) -> None:
        lines = self._run.read_metrics()
        if not self.pids and lines and lines[-1]["step"] >= self._step:
            self.pids = {rank: process_of(f"rank-{rank}") for rank in range(2)}
            os.kill(self.pids[1], signal.SIGSTOP)

    def stopping(self) -> None:
        """Nothing to show."""


def test_a_rank_that_hangs_ends_the_run_in_one_line_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Nobody hangs up, and whoever watches is too patient to say so: comm.timeout_seconds ends the others'
    waiting."""
    corpus = make_corpus(tmp_path, count=300)
    run = Run(tmp_path / "run")
    patient = ["resilience.timeout_scale=30", "resilience.restarts=0"]
    more = [*patient, "comm.timeout_seconds=6", "model.layers=2", "train.steps=5000", "checkpoint.every=4"]
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", "train.threads=1", *more, "layout.pp=2"]))
    freeze = _Freeze(run, step=5)
    with pytest.raises(
        RunFailedError, match=r"^rank 0: timed out: another rank did not answer for 6 s"
    ) as caught:
        run_local(run, 2, threads=1, observer=freeze)
    assert "\n" not in str(caught.value)
    assert sorted(freeze.pids) == [0, 1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in freeze.pids.values())
    (fault,) = (event for event in run.read_events() if event["event"] == "fault")
    assert (
        fault["problem"].startswith("rank 0: timed out")
        and fault["step"] == run.read_metrics()[-1]["step"] + 1
    )
    saved = CheckpointFolder(run.checkpoints_path).newest()
    assert saved is not None and saved[0] >= 4 and saved[1] == [], "what was saved is still whole"
