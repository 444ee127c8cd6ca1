"""The launcher of local ranks on real processes: what a user sees when ranks end, die or are interrupted.

The ranks here are small scripts that keep the contract of ``python -m myriad.train.worker``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from same_run import train_undisturbed
from typer.testing import CliRunner
from watching import is_alive, wait_until

from myriad.cli.main import build_app
from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job, ResilienceConfig, load_job
from myriad.launchers.local import check_cores, run_local
from myriad.run import Run
from myriad.system.machine import num_cores

_HEAD = """
import os, signal, sys, time
from pathlib import Path
from myriad.run import Run
run, rank, world = Run(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
(run.path / f"pid-{rank}").write_text(str(os.getpid()))
def everyone():
    while len(list(run.path.glob("pid-*"))) < world:
        time.sleep(0.02)
"""

_SLEEP = "everyone()\ntime.sleep(60)\n"


def make_run(path: Path, restarts: int = 0, patience: float = 1.0) -> Run:
    """Of a job whose first fault ends it, unless it may begin again."""
    run = Run(path / "run")
    run.create_or_resume(Job(resilience=ResilienceConfig(restarts=restarts, timeout_scale=patience)))
    return run


def worker(path: Path, body: str) -> list[str]:
    script = path / "worker.py"
    script.write_text(_HEAD + textwrap.dedent(body))
    return [sys.executable, str(script)]


def rank_pids(run: Run) -> list[int]:
    return [int(text) for path in run.path.glob("pid-*") if (text := path.read_text())]


def assert_none_left(run: Run) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in rank_pids(run)))


def start_launcher(run: Run, command: list[str], world: int = 2) -> "subprocess.Popen[str]":
    """A launcher in a process of its own, so that it can be killed or interrupted."""
    code = f"""
        import sys
        from myriad.errors import RunFailedError
        from myriad.launchers.local import run_local
        from myriad.run import Run
        class Screen:
            def tick(self): pass
            def stopping(self): print("saving", flush=True)
        try:
            print(run_local(Run({str(run.path)!r}), {world}, command={command!r}, observer=Screen()))
        except RunFailedError as error:
            print("failed", error)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_each_rank_gets_the_environment_that_torchrun_gives_and_attempts_keep_their_own_logs(tmp_path):
    """A screen that fails does not stop the first of them."""

    class Broken:
        def tick(self) -> None:
            raise BrokenPipeError

        def stopping(self) -> None: ...

    run = make_run(tmp_path)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    command = worker(tmp_path, f"print([os.environ[name] for name in {names!r}.split()])\ntime.sleep(0.3)")
    assert run_local(run, 3, command=command, observer=Broken()) == "finished"
    lines = [eval(run.log_path(rank, 1).read_text()) for rank in range(3)]
    assert [line[:5] for line in lines] == [[str(r), "3", str(r), "3", "127.0.0.1"] for r in range(3)]
    assert len({line[5] for line in lines}) == 1
    assert int(lines[0][6]) == max(1, num_cores() // 3)
    assert run_local(run, 1, command=command) == "finished"
    (first, again) = (eval(run.log_path(0, attempt).read_text()) for attempt in (1, 2))
    assert first == lines[0] and again[:2] == ["0", "1"]


_ERRS = """
import subprocess
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    (run.path / "pid-child").write_text(str(child.pid))
everyone()
if rank == 0: raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:123")
while rank == 1 and not (run.path / "pid-child").exists(): time.sleep(0.02)
if rank == 1: time.sleep(0.4); raise ValueError("the moon is full")
time.sleep(60)
"""


def test_an_error_of_the_program_is_named_and_ends_the_run_when_it_comes_again(tmp_path):
    """With its traceback: not the rank that lost its connection first. Ranks that ignore SIGTERM and their
    children are gone."""
    run = make_run(tmp_path, restarts=3)
    with pytest.raises(RunFailedError) as caught:
        run_local(run, 3, command=worker(tmp_path, _ERRS))
    message = str(caught.value)
    assert re.match(r"(?s)rank 1 ended with exit code 1 .*Traceback.*ValueError: the moon is full", message)
    assert str(run.log_path(1, 2)) in message
    assert [event["event"] for event in run.read_events()] == ["fault", "restart", "fault", "failed"]
    assert run.log_path(1, 2).exists() and not run.log_path(1, 3).exists()
    assert len(rank_pids(run)) == 4
    assert_none_left(run)


def test_an_expected_error_of_a_rank_stays_one_line(tmp_path):
    run = make_run(tmp_path)
    body = "print('myriad: error: loss = nan: step 3, first in layers.0.norm', file=sys.stderr); sys.exit(1)"
    with pytest.raises(
        RunFailedError, match=r"^rank 0: loss = nan: step 3, first in layers\.0\.norm [^\n]*$"
    ):
        run_local(run, 1, command=worker(tmp_path, body))


def test_a_launcher_killed_with_sigkill_leaves_no_rank(tmp_path):
    run = make_run(tmp_path)
    launcher = start_launcher(run, worker(tmp_path, _SLEEP))
    try:
        wait_until(lambda: len(rank_pids(run)) == 2)
        assert all(is_alive(pid) for pid in rank_pids(run))
    finally:
        launcher.kill()
        launcher.communicate()
    assert_none_left(run)


_SAVES = """
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
everyone()
while not stop: time.sleep(0.02)
time.sleep(0.3)
(run.path / f"saved-{rank}").write_text(str(len(stop)))
"""


def test_ctrl_c_lets_every_rank_save_once_and_ends_the_run_as_interrupted(tmp_path):
    run = make_run(tmp_path)
    launcher = start_launcher(run, worker(tmp_path, _SAVES))
    wait_until(lambda: len(rank_pids(run)) == 2)
    time.sleep(0.2)
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: to the launcher's whole group
    output, _ = launcher.communicate(timeout=60)
    assert output.split() == ["saving", "interrupted"]
    assert [(run.path / f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert_none_left(run)


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    run = make_run(tmp_path)
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + _SLEEP
    launcher = start_launcher(run, worker(tmp_path, body))
    wait_until(lambda: len(rank_pids(run)) == 2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout is not None and launcher.stdout.readline().strip() == "saving"
    time.sleep(0.1)  # signals that come within 20 ms are one
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert output.split() == ["interrupted"]
    assert_none_left(run)


_HANGS = """
from myriad.telemetry.progress.progress_page import own_row
from myriad.telemetry.spans import Recorder
row = own_row()
recorder = Recorder(row=row)
row.step(4)
row.step_done()
row.step(5)
if os.environ["MYRIAD_EPOCH"] == "1":
    with recorder.span("backward" if rank == 1 else "reduce"):
        time.sleep(60)
"""


def test_a_rank_that_hangs_is_named_and_the_run_continues(tmp_path):
    run = make_run(tmp_path, restarts=3, patience=0.1)
    assert run_local(run, 3, command=worker(tmp_path, _HANGS)) == "finished"
    diagnosis, fault, restart = run.read_events()
    assert diagnosis["event"] == "diagnosis" and diagnosis["ranks"] == [1]
    assert (fault["event"], fault["cause"], fault["rank"], fault["step"]) == ("fault", "hang", 1, 5)
    assert 'in "backward" of step 5, has not entered communication 1; 2 waiting' in fault["problem"]
    assert restart["event"] == "restart" and restart["epoch"] == 2
    assert_none_left(run)


_DIES_ONCE = """
if os.environ["MYRIAD_EPOCH"] == "1":
    everyone()
    if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_a_killed_rank_is_reported_as_killed_and_ctrl_c_while_ranks_begin_again_stops_the_run(tmp_path):
    run = make_run(tmp_path, restarts=3)
    launcher = start_launcher(run, worker(tmp_path, _DIES_ONCE))
    wait_until(lambda: any(event["event"] == "fault" for event in run.read_events()))
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert output.split() == ["saving", "interrupted"]
    (fault,) = (event for event in run.read_events() if event["event"] == "fault")
    assert fault["problem"].startswith("rank 0 was killed by SIGKILL")
    assert_none_left(run)


def test_more_ranks_than_cores_are_refused_unless_asked_for():
    with pytest.raises(BadInputError, match="--oversubscribe"):
        check_cores(num_cores() + 1)
    check_cores(num_cores() + 1, oversubscribe=True)
    check_cores(num_cores())


def started(*arguments: str) -> str:
    """What a command of its own process has printed."""
    command = [sys.executable, "-m", "myriad.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def told(*arguments: str) -> str:
    """What a command that starts no ranks has printed."""
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_is_trained_as_it_is_resumed_in_another_layout_and_generates_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = ["--train.steps", "6", "--optimizer.warmup_steps", "1", "--optimizer.decay", "constant"]
    where = ["--cluster", "laptop", "--gpus", "2", "--out", "plan.toml"]
    small = ["--model.layers", "2", "--model.hidden", "64", "--model.sequence", "64", "--train.threads", "1"]
    told("plan", "tiny", *where, *steps, *small)
    before = json.loads(started("train", "plan.toml", "--run", "runs/tiny", "--oversubscribe", "--json"))
    assert (before["state"], before["steps"], before["world"], before["lossy"]) == ("finished", 6, 2, [])
    layout = ["--layout.pp", "1", "--layout.dp", "1", "--layout.tp", "1", "--layout.cp", "2"]
    shown = started("train", "runs/tiny", "--train.steps", "10", *layout, "--oversubscribe")
    assert "10 of 10" in shown and "checkpoint saved" in shown
    after = json.loads(told("train", "runs/tiny", "--json"))
    assert (after["state"], after["steps"], after["world"]) == ("finished", 10, 2)
    assert after["loss"] < before["loss"]
    spoken = told("sample", "tiny", "--prompt", "import ", "--tokens", "8")
    assert spoken.startswith("import ") and len(spoken) > len("import \n")


def test_a_lossy_run_reports_it(tmp_path):
    run = Run(tmp_path / "run")
    run.create_or_resume(
        load_job("tiny", ["train.steps=4", "train.threads=1", "layout.dp=2", "comm.sync_every=2"])
    )
    shown = told("train", str(train_undisturbed(run).path), "--oversubscribe")
    assert "4 of 4" in shown
    assert "replicas synchronize every 2 steps: not the result of one process" in " ".join(
        shown.replace("│", "").split()
    )
