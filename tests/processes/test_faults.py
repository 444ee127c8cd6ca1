"""What `myriad faults run` refuses; `tests/hosts/test_faults_on_hosts.py` breaks a run with it."""

import os
import subprocess
import sys
from pathlib import Path


def faults(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "myriad.cli.main", "faults", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


def test_what_cannot_be_caused_starts_nothing(tmp_path: Path) -> None:
    scenario = tmp_path / "wrong.toml"
    scenario.write_text('job = "tiny"\n[[faults]]\nkind = "kill"\nrank = 7\n')
    done = faults("run", str(scenario), "--folder", str(tmp_path / "runs"))
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr == "myriad: error: faults.0.rank = 7: the job has 1 ranks, 0 to 0\n"
