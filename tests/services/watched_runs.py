"""Runs of forked ranks in which something happens at a step: at exactly that one, however fast they train."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ranks import enter, environments, run_ranks

from myriad.checkpoint.snapshots.snapshot_client import list_in_memory, server_name
from myriad.data import loader
from myriad.data.loader_process import LoaderThread
from myriad.job import load_job
from myriad.run import Run
from myriad.train import worker

__all__ = [
    "Acts",
    "events",
    "kill_rank",
    "kill_run",
    "kill_snapshot_server",
    "lose_ranks",
    "make_run",
    "steps_in_memory",
    "stored_at",
    "train",
    "wait_for_event",
    "wait_for_snapshot_server_to_end",
    "wait_until",
]  # fmt: skip

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1"]
TWO_REPLICAS = ["layout.dp=2", "layout.micro_batch=4"]

Acts = Mapping[int, Callable[[], None]]
"""By step: what rank 0 does right after it, before a snapshot of that step is taken."""


def make_run(path: Path, corpus: Path, *overrides: str) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *overrides]))
    return run


def _train(run: Run, acts: Acts) -> int:
    """Be a rank, whose loader is a thread of it: as a process it would take half a CPU-second."""
    loader._LoaderProcess = LoaderThread  # type: ignore[assignment,misc]
    trainer_tells = Run.append_metrics

    def tell(self: Run, record: Mapping[str, Any]) -> None:
        trainer_tells(self, record)
        acts.get(record["step"], lambda: None)()

    Run.append_metrics = tell
    return worker.main([str(run.path)])


def train(run: Run, acts: Acts | None = None) -> list[int]:
    """The ranks' exit codes."""
    return run_ranks(run.job().layout.world, _train, run, acts or {}, timeout=120)


def lose_ranks(run: Run, acts: Acts) -> None:
    """The same for ranks that end without an answer; returns when all of them are gone."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=enter, args=(_train, rank, environment, (run, acts), results))
        for rank, environment in enumerate(environments(run.job().layout.world))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()


def events(run: Run, *names: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] in names]


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)


def wait_for_event(run: Run, name: str, **fields: Any) -> None:
    """Until there is one with these fields."""
    wait_until(
        lambda: any(fields.items() <= event.items() for event in events(run, name)), f"{name} {fields}"
    )


def stored_at(run: Run, step: int) -> Callable[[], None]:
    """Waits until a step is durable: what follows begins with nothing under way."""
    return lambda: wait_for_event(run, "checkpoint", step=step)


def _server_pids(run: Run) -> list[int]:
    name, found = server_name(run.path).encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if name in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def kill_snapshot_server(run: Run) -> None:
    for pid in _server_pids(run):
        os.kill(pid, signal.SIGKILL)
    wait_for_snapshot_server_to_end(run)


def wait_for_snapshot_server_to_end(run: Run) -> None:
    wait_until(lambda: not _server_pids(run), "the end of the snapshot server")


def kill_run(run: Run) -> None:
    """As if the machine had gone: the snapshot server, then this rank, in whose process it is called; the
    others see it."""
    for pid in _server_pids(run):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_rank() -> None:
    """This process; the snapshot server stays."""
    os.kill(os.getpid(), signal.SIGKILL)


def steps_in_memory(run: Run) -> list[int]:
    """Of which the snapshot server has a snapshot of every rank."""
    return [step for step, _ in list_in_memory(run.path)]
