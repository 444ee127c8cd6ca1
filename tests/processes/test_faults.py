"""Breaking a real run with the command that people use: what it says is what happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_corpora import make_corpus

JOB = """job = "tiny"
overrides = ["data.corpus={corpus}", "model.layers=2", "model.hidden=32", "model.sequence=32",
    "train.threads=1", "train.steps=20", "layout.dp=2", "layout.micro_batch=2", "checkpoint.memory_seconds=0"]
"""
KILL_AND_STOP = """
[[faults]]
kind = "kill"
rank = 1
step = 5
[[faults]]
kind = "stop"
rank = 0
step = 12
"""


def faults(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "myriad.cli.main", "faults", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


def test_a_killed_and_a_stopped_rank_are_graded_as_recovered_to_the_bit(tmp_path: Path) -> None:
    scenario = tmp_path / "both.toml"
    corpus = make_corpus(tmp_path, count=300)
    scenario.write_text(JOB.format(corpus=corpus) + KILL_AND_STOP)
    done = faults("run", str(scenario), "--oversubscribe", "--json", "--folder", str(tmp_path / "runs"))
    (report,) = json.loads(done.stdout)["scenarios"]
    assert report["outcome"] == "finished" and report["equal"] is True, done.stderr
    killed, stopped = report["grades"]
    assert killed["report"] == "rank 1 was killed by SIGKILL"
    assert stopped["report"].startswith("rank 0 was stopped (SIGSTOP)")
    for grade in (killed, stopped):
        assert grade["culprit_right"] and grade["steps_lost"] <= 1
    assert (report["evicted_healthy"], report["false_alarms"]) == (0, 0)
    assert done.returncode == (0 if report["met"] else 1)


def test_what_cannot_be_caused_starts_nothing(tmp_path: Path) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text('job = "tiny"\n[[faults]]\nkind = "kill"\nrank = 7\n')
    done = faults("run", str(scenario), "--folder", str(tmp_path / "runs"))
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr == "myriad: error: faults.0.rank = 7: the job has 1 ranks, 0 to 0\n"
