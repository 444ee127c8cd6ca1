"""Breaking a real run with the command that people use: what it says is what happened. If this fails, ranks
or links cannot be broken on purpose, or a node whose link is down holds all others for as long as a hang is
waited for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_corpora import make_corpus

from hosts import missing

SCENARIO = """job = "tiny"
overrides = ["data.corpus={corpus}", "model.layers=2", "model.hidden=32", "model.sequence=32",
    "train.threads=1", "train.steps=20", "layout.dp=2", "layout.zero=3", "layout.micro_batch=2",
    "comm.hierarchy=flat", "checkpoint.memory_seconds=0", "checkpoint.copies_every=5", "resilience.nodes=2",
    "resilience.spares=1"]
hosts = true
[[faults]]
kind = "kill"
rank = 1
step = 4
[[faults]]
kind = "stop"
rank = 0
step = 8
[[faults]]
kind = "link-down"
where = "node"
node = 1
step = 13
"""


def test_a_killed_and_a_stopped_rank_recover_and_a_spare_takes_the_place_of_the_node_whose_link_stays_down(
    tmp_path: Path,
) -> None:
    if problem := missing():
        pytest.skip(f"hosts cannot be made: {problem}")
    scenario = tmp_path / "link.toml"
    scenario.write_text(SCENARIO.format(corpus=make_corpus(tmp_path, count=300)))
    command = [sys.executable, "-m", "myriad.cli.main", "faults", "run", str(scenario), "--oversubscribe"]
    command += ["--json", "--folder", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    (report,) = json.loads(done.stdout)["scenarios"]
    assert report["outcome"] == "finished" and report["equal"] is True, done.stderr
    killed, stopped, cut = report["grades"]
    assert killed["report"] == "rank 1 was killed by SIGKILL"
    assert stopped["report"].startswith("rank 0 was stopped (SIGSTOP)")
    assert cut["report"] == "link eth1 of node 1 is down"
    assert killed["steps_lost"] <= 1 and stopped["steps_lost"] <= 1
    for grade in (killed, stopped, cut):
        assert grade["culprit_right"]
        assert not [text for text in grade["missed"] if "after" not in text], "all but seconds"
    assert (report["evicted_healthy"], report["false_alarms"]) == (0, 0)
    assert done.returncode == (0 if report["met"] else 1)
