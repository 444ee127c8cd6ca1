"""The pages of `myriad watch` for a run of a million steps: what an answer costs the server.

    python benchmarks/telemetry/long_run_page.py [--steps 1000000] [--json]

reading     the run's files once, by the thread that follows them, and for the table of runs; no answer waits
overview    the charts of the whole run, as 2,000 points of each number; and of 2,000 steps, all of them
runs        the table of runs, and the same run's curves in it, as 1,000 points

Processor seconds of the thread that answers, JSON included, the middle of five. Other threads make the
account of the run's time and read the curves, so a first answer may lack them.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from myriad.cli.watch_content import OneRun, content_of
from myriad.dashboard.api import run_api
from myriad.dashboard.many.live_table import LiveTable, id_of
from myriad.dashboard.many.runs_api import RunsApi
from myriad.dashboard.run_page import Follower
from myriad.dashboard.tile import to_json
from myriad.job import load_job
from myriad.run import Run

_TRIES = 5
_BEGAN = 1.7e9


def make_run(folder: Path, steps: int) -> Run:
    """Write what a run of so many steps has in metrics.jsonl and events.jsonl."""
    run = Run(folder)
    run.create_or_resume(load_job("tiny", [f"train.steps={steps}"]))
    start = {"world": 1, "device": "cuda", "peak_flops": 1e15, "peak_source": "data sheet"}
    events = [{"time": _BEGAN, "event": "start", **start}]
    with run.metrics_path.open("w") as file:
        for step in range(1, steps + 1):
            noise = (step * 7919 % 1000) / 1000
            line = {
                "time": _BEGAN + step,
                "step": step,
                "loss": 2 + 8 / (1 + step / 1000) + noise / 10,
                "grad_norm": 0.5 + noise,
                "learning_rate": 1e-4,
                "tokens": 512 * step,
                "tokens_per_second": 512.0 + noise,
                "step_seconds": 1.0 + noise / 10,
                "flops": 4e14,
                "mfu": 0.4,
                "memory_bytes": 2**34,
                "data_wait_seconds": noise / 1000,
                "checkpoint_wait_seconds": 0.0,
                "exposed_comm_seconds": noise / 100,
            }
            file.write(json.dumps(line) + "\n")
            if step % 10_000 == 0:
                events.append(
                    {"time": _BEGAN + step, "event": "validation", "step": step, "loss": line["loss"]}
                )
    events.append({"time": _BEGAN + steps, "event": "finish", "step": steps})
    run.events_path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def cpu_seconds(do: Callable[[], object], tries: int = _TRIES) -> float:
    """Return the middle of the processor seconds of some calls."""
    found = []
    for _ in range(tries):
        began = time.thread_time()
        do()
        found.append(time.thread_time() - began)
    return statistics.median(found)


def measure(folder: Path, steps: int) -> dict[str, float]:
    """Return processor seconds by what is done."""
    run = make_run(folder / "runs" / "long", steps)
    content = content_of([str(run.path)])
    assert isinstance(content, OneRun)
    watched, middle = content.watched, str(steps // 2)
    found = {"reading the run": cpu_seconds(lambda: Follower(watched).poll(), 1)}

    def overview(**query: str) -> Callable[[], bytes]:
        return lambda: to_json(run_api.overview(watched, query))

    found["overview, first answer"] = cpu_seconds(overview(points="2000"), 1)
    found["overview, whole run"] = cpu_seconds(overview(points="2000"))
    found["overview, 2,000 steps"] = cpu_seconds(
        overview(points="2000", first=middle, last=str(steps // 2 + 1999))
    )
    table = LiveTable([folder / "runs"])
    found["reading the table"] = cpu_seconds(table.poll, 1)
    api = RunsApi(table)
    asked = {"runs": id_of(run.path), "points": "1000"}
    found["table of runs"] = cpu_seconds(lambda: to_json(api.runs({})))
    found["curves of runs, first answer"] = cpu_seconds(lambda: to_json(api.curves(asked)), 1)
    while api.curves(asked)["runs"][0]["reading"]:
        time.sleep(1.0)
    found["curves of runs"] = cpu_seconds(lambda: to_json(api.curves(asked)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.steps)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.steps:,} steps, processor seconds")
    for name, seconds in found.items():
        print(f"{name:32} {seconds:8.3f}")


if __name__ == "__main__":
    main()
