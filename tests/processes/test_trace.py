"""A run that trains is looked into: files are there and can be read, and the run continues unaffected."""

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from same_run import slow_steps
from tiny_corpora import make_corpus
from watching import process_of, wait_until

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.supervise.driver_requests import request_trace
from myriad.supervise.messages import TraceAnswer
from myriad.system.jsonl import JsonlTail
from myriad.telemetry.loggers import read_forwarded

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=100000"]
TWO = ["layout.dp=2", "layout.zero=2", "resilience.timeout_scale=40", "resilience.on_slow=report"]


class Looks:
    """Does something beside the run once it trains; then has it stop."""

    def __init__(self, run: Run, act: Callable[[], None]) -> None:
        self._run, self._act = run, act
        self.error: BaseException | None = None
        self._over = self._asked = False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        try:
            wait_until(lambda: len(self._run.read_metrics()) >= 3, 60)
            self._act()
        except BaseException as error:
            self.error = error
        self._over = True

    def tick(self) -> None:
        if self._over and not self._asked:
            self._asked = True
            os.kill(os.getpid(), signal.SIGINT)

    def stopping(self) -> None: ...

    def end(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def look_at(run: Run, act: Callable[[], None]) -> None:
    looks = Looks(run, act)
    assert run_local(run, 2, threads=1, observer=looks) == "interrupted"
    looks.end()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("traced")
    run = Run(folder / "run")
    corpus = make_corpus(folder, count=300)
    loggers = ['telemetry.loggers=["tensorboard"]'] if find_spec("tensorboard") else []
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *TWO, *loggers]))
    return run


def test_ranks_are_looked_into_while_they_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slow_steps(run.path / "faults", 4.0).items():
        monkeypatch.setenv(name, value)
    answers: dict[str, TraceAnswer] = {}

    def act() -> None:
        with pytest.raises(BadInputError, match="no rank 5 in this run, which has 0 to 1"):
            request_trace(run, [1, 5], 1)
        answers["profile"] = request_trace(run, [0, 1], 0.3)
        answers["again"] = request_trace(run, [1], 0.1)
        answers["flight"] = request_trace(run, [1], 1, "flight")
        answers["stacks"] = request_trace(run, [], 1, "stacks")
        answers["network"] = request_trace(run, [0], 0.3, "network")
        pid = process_of("rank-1")
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(0.1)
            answers["stopped"] = request_trace(run, [1], 1, "stacks")
        finally:
            os.kill(pid, signal.SIGCONT)
        before = len(run.read_metrics())
        wait_until(lambda: len(run.read_metrics()) > before + 3, 60)

    look_at(run, act)
    steps = [record["step"] for record in JsonlTail(run.metrics_path).poll()]
    events = run.read_events()
    assert steps == list(range(1, len(steps) + 1)), "no step was done twice"
    assert not [event for event in events if event["event"] in ("fault", "restart", "move")]
    told = [event for event in events if event["event"] == "trace"]
    assert [event["what"] for event in told] == [
        "profile",
        "profile",
        "flight",
        "stacks",
        "network",
        "stacks",
    ]
    assert all(event["who"] and event["num_files"] == len(event["files"]) for event in told)
    check_profiles(run, answers["profile"], 2)
    check_profiles(run, answers["again"], 1)
    (flight,) = answers["flight"].files
    entries = json.loads((run.path / flight).read_text())["entries"]
    assert any("all_reduce" in one["profiling_name"] for one in entries)
    check_stacks(run, answers)
    (network,) = answers["network"].files
    looks = JsonlTail(run.path / network).poll()
    assert "sent_bytes" in looks[0]["fields"]["links"] and len(looks) > 10 and "lo" in looks[1]["links"]
    assert any("lo: at most" in line for line in answers["network"].found)
    assert len(JsonlTail(run.counters_path / "node-0.jsonl").poll()) > 3, "each second, by itself"


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="pip install tensorboard")
def test_tensorboard_has_had_every_step(run: Run) -> None:
    """Of the run before, while it was looked into."""
    assert [path.name.split(".")[0] for path in (run.path / "tensorboard").iterdir()] == ["events"]
    assert read_forwarded(run.path, "tensorboard").metrics == run.metrics_path.stat().st_size
    assert not [event for event in run.read_events() if event["event"] == "logger"]


def check_profiles(run: Run, answer: TraceAnswer, count: int) -> None:
    assert answer.problems == () and len(answer.files) == count
    for name in answer.files:
        with gzip.open(run.path / name) as file:
            events = json.load(file)["traceEvents"]
        check_spans_lie_over_their_operators(events)
        names = {event.get("name") for event in events}
        assert "aten::mm" in names and any("Backward" in str(name) for name in names)
        assert not any("gloo" in str(name) for name in names), "what other threads do kills the rank later"


def check_spans_lie_over_their_operators(events: list[dict[str, Any]]) -> None:
    """Otherwise a matrix product cannot be assigned to its forward."""
    (lane,) = {one["tid"] for one in events if (one.get("args") or {}).get("name") == "spans"}
    spans = [one for one in events if one["ph"] == "X" and one["tid"] == lane]
    times = {one["ts"] for one in spans if one["name"] == "forward" and one["args"]["micro_batch"] >= 0}
    assert times and {"backward", "load"} <= {one["name"] for one in spans}
    computing = [
        (one["ts"], one["ts"] + one["dur"]) for one in spans if one["name"] in ("forward", "backward")
    ]
    # A trace may begin and end inside a forward whose span it does not have.
    begin, end = min(first for first, _ in computing), max(last for _, last in computing)
    every = [one["ts"] for one in events if one.get("name") == "aten::mm"]
    products = [at for at in every if begin <= at <= end]
    assert len(products) > 0.5 * len(every), "the clocks of both agree"
    inside = [any(first <= at <= last for first, last in computing) for at in products]
    assert sum(inside) > 0.9 * len(products), "the clocks of both agree"
    assert nest([(one["ts"], one["ts"] + one["dur"]) for one in spans])


def nest(times: list[tuple[float, float]]) -> bool:
    """None of these begins in another one and ends after it."""
    ends: list[float] = []
    for first, last in sorted(times, key=lambda one: (one[0], -one[1])):
        while ends and ends[-1] <= first:
            ends.pop()
        if ends and last > ends[-1] + 0.002:  # microseconds, as told with three digits
            return False
        ends.append(last)
    return True


def check_stacks(run: Run, answers: dict[str, TraceAnswer]) -> None:
    texts = [(run.path / name).read_text() for name in answers["stacks"].files]
    assert answers["stacks"].problems == () and len(texts) == 2
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}, pid ") and "train/trainer.py" in text
        assert "In the kernel:" in text and f"myriad-rank-{rank}" in text
    (name,) = answers["stopped"].files
    stopped = (run.path / name).read_text()
    assert "state T: step " in stopped and "myriad-rank-1: T" in stopped
    has_stacks = "train/trainer.py" in stopped
    assert has_stacks or ("py-spy" in stopped and len(answers["stopped"].problems) == 1)
