"""If this fails, a plan is a file that `myriad train` does not take as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _myriad(folder: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "myriad.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_takes_a_plan_as_it_is(tmp_path: Path) -> None:
    steps = ("--train.steps", "3", "--optimizer.warmup_steps", "1", "--train.threads", "1")
    _myriad(tmp_path, "plan", "tiny", "--cluster", "laptop", "--gpus", "2", "--out", "plan.toml", *steps)
    told = json.loads(_myriad(tmp_path, "train", "plan.toml", "--oversubscribe", "--json"))
    assert told["state"] == "finished" and told["steps"] == 3 and told["world"] == 2
