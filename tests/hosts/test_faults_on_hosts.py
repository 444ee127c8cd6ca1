"""If this fails, links cannot be broken on purpose, or a node whose link is down holds all others for as long
as a hang is waited for."""

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
    "train.threads=1", "train.steps=24", "layout.dp=2", "layout.zero=3", "layout.micro_batch=2",
    "comm.hierarchy=flat", "checkpoint.memory_seconds=0", "checkpoint.copies_every=5", "resilience.nodes=2",
    "resilience.spares=1"]
hosts = true
[[faults]]
kind = "link-down"
where = "node"
node = 1
step = 12
"""


def test_the_node_whose_link_stays_down_is_named_with_the_link_and_a_spare_takes_its_place(
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
    (grade,) = report["grades"]
    assert grade["report"] == "link eth1 of node 1 is down" and grade["culprit_right"]
    assert not [text for text in grade["missed"] if "after" not in text], "all but seconds"
    assert (report["evicted_healthy"], report["false_alarms"]) == (0, 0)
