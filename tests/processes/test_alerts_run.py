"""If this fails, a run that needs a person does not say so where a person looks, says it twice, or is held up
by the place that it says it to. A real run: a web server takes alarms, a program that hangs does not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from same_run import slow_steps
from tiny_corpora import make_corpus
from watching import process_of, wait_until

from myriad.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "alerts"))
from alert_servers import HookServer

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "layout.dp=2"]


def launch(folder: Path, url: str) -> "tuple[Run, subprocess.Popen[bytes]]":
    run, hangs = Run(folder / "run"), [sys.executable, "-c", "import time; time.sleep(600)"]
    given = [*SMALL, f"data.corpus={make_corpus(folder, count=300)}", "train.steps=30"]
    given += ["checkpoint.memory_seconds=0", f"alerts.webhook.url={url}", f"alerts.exec.command={hangs}"]
    given += [
        "alerts.exec.seconds=2",
        "alerts.group_seconds=0.5",
        "alerts.levels=['finish=warning', 'spike=off']",
    ]
    given += ["alerts.log_patterns=['scale [0-9]+ is too small']"]
    options = [word for one in given for word in (f"--{one.partition('=')[0]}", one.partition("=")[2])]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(run.path), *options]
    around = os.environ | slow_steps(folder / "faults", 24.0)  # the run lasts until it was broken
    return run, subprocess.Popen([*command, "--oversubscribe"], stdout=subprocess.DEVNULL, env=around)


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [one for one in run.read_events() if one["event"] == name]


def test_alarms_of_a_run_arrive_once_and_a_place_that_hangs_costs_it_nothing(tmp_path: Path) -> None:
    server = HookServer()
    with server.serving() as url:
        run, launcher = launch(tmp_path, url)
        with launcher:
            try:
                break_it(run, launcher, server)
            finally:
                launcher.kill()
    assert len({body["id"] for body in server.bodies}) == len(server.bodies), "one came twice"
    told = [(body["kind"], body["cause"]) for body in server.bodies]
    assert ("alarm", "fault") in told and ("alarm", "finish") in told
    assert url not in "".join(path.read_text() for path in run.logs_path.glob("*.log"))


def break_it(run: Run, launcher: "subprocess.Popen[bytes]", server: HookServer) -> None:
    wait_until(lambda: run.path.exists() and len(run.read_metrics()) > 5)
    log = run.log_path(1, 1)
    with log.open("a") as file:
        file.write("loss scale 12 is too small\nNCCL WARN Net : Connection closed by remote peer\n")
    written = time.time()
    wait_until(lambda: len(events(run, "log_match")) == 2)
    own, nccl = sorted(events(run, "log_match"), key=lambda one: one["what"], reverse=True)
    assert (own["what"], nccl["what"]) == ("scale [0-9]+ is too small", "NCCL")
    assert (own["rank"], own["node"], own["epoch"], own["log"]) == (1, 0, 1, log.name) and own["step"] > 0
    assert own["time"] - written < 5.0
    wait_until(lambda: any(body["cause"] == "log_match" for body in server.bodies))
    os.kill(json.loads((run.path / "driver.json").read_text())["pid"], signal.SIGKILL)
    os.kill(process_of("rank-1", launcher.pid), signal.SIGKILL)
    wait_until(lambda: any("ended after" in str(body["lines"]) for body in server.bodies))
    assert launcher.wait(120) == 0
    wait_until(lambda: any(body["cause"] == "finish" for body in server.bodies))
