"""If these fail, a curve in another tool has holes or doubles, or that tool holds up a run."""

import importlib.util
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.launcher import check_engine
from myriad.launchers.metric_loggers import logged
from myriad.run import Run
from myriad.telemetry.loggers import MetricForwarder, open_sink, read_forwarded, scalars_of

HANGS = """
import time
class Metric: ...
class Param: ...
class MlflowClient:
    def __init__(self, tracking_uri): time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "my-run")
    run.create_or_resume(load_job("tiny"))
    return run


def step(run: Run, number: int, loss: float | None = 2.0) -> None:
    run.append_metrics({"time": 1e9 + number, "step": number, "loss": loss, "mfu": 0.5, "tokens": 7 * number})


class Kept:
    """A tool that remembers; it fails as often as the test requests."""

    def __init__(self, away: int = 0) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self._new: list[tuple[int, dict[str, float]]] = []
        self.away, self.closed = away, False

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        self._new.append((step, dict(scalars)))

    def flush(self) -> None:
        new, self._new = self._new, []
        if self.away:
            self.away -= 1
            raise ConnectionError("away")
        self.lines += new

    def close(self) -> None:
        self.closed = True


def test_each_step_is_forwarded_once_also_by_the_next_process(run: Run) -> None:
    first, second = Kept(), Kept()
    step(run, 1)
    step(run, 2, None)
    MetricForwarder("wandb", run.path, lambda name, path: first).forward()
    with run.metrics_path.open("a") as file:
        file.write('{"time": 1, "st')  # a rank is killed in the middle of a line
    step(run, 3)
    run.append_event("validation", step=3, loss=1.5, bits_per_byte=2.5)
    run.append_event("validation_set", step=3, name="books", loss=1.25)
    run.append_event("evaluation", step=3, scores={"choice/acc": 0.75}, seconds=1.0)
    run.append_event("fault", step=3, problem="no number")
    MetricForwarder("wandb", run.path, lambda name, path: second).forward()
    assert first.lines == [(1, {"loss": 2.0, "mfu": 0.5}), (2, {"mfu": 0.5})]
    assert second.lines == [
        (3, {"loss": 2.0, "mfu": 0.5}),
        (3, {"validation_loss": 1.5, "validation_bits_per_byte": 2.5}),
        (3, {"validation_loss/books": 1.25}),
        (3, {"evaluation/choice/acc": 0.75}),
    ]
    assert read_forwarded(run.path, "wandb").metrics == run.metrics_path.stat().st_size


def test_nothing_is_lost_while_a_tool_is_away(run: Run) -> None:
    kept, over = Kept(away=1), threading.Event()
    over.set()
    step(run, 1)
    follower = MetricForwarder("mlflow", run.path, lambda name, path: kept)
    follower.follow(over)
    assert follower.failures == 1 and kept.lines == [] and read_forwarded(run.path, "mlflow").metrics == 0
    step(run, 2)
    follower.follow(over)
    assert [number for number, _ in kept.lines] == [1, 2] and follower.failures == 0 and kept.closed


def test_lines_of_others_are_no_curve() -> None:
    assert scalars_of({"step": 1, "time": 2.0, "loss": "x", "mfu": True, "nan": float("nan")}) == {}
    assert scalars_of({"step": "one", "time": 2.0, "loss": 1.0}) == {}
    norms = {"layer_norms": {"update": {"head": 0.5, "blocks.0": None}, "gradient": 3}}
    assert scalars_of({"step": 1, "time": 2.0, **norms}) == {"update_norm/head": 0.5}
    own = {"user": {"mine": 0.5, "gone": None}}
    assert scalars_of({"step": 1, "time": 2.0, **own}) == {"user/mine": 0.5}
    assert scalars_of({"step": 1, "time": 2.0, "user": [1]}) == {}


def test_a_package_that_is_missing_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    job = load_job("tiny", ['telemetry.loggers=["wandb"]'])
    with pytest.raises(BadInputError, match=r"telemetry.loggers.*pip install 'myriad-train\[wandb\]'"):
        check_engine(job)
    with pytest.raises(BadInputError, match=r"telemetry\.loggers.*\"tensorboard\", \"wandb\" or \"mlflow\""):
        load_job("tiny", ['telemetry.loggers=["excel"]'])


def test_a_tool_that_hangs_ends_with_its_run_and_what_it_missed_is_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process, with a package that never comes back."""
    for name in ("__init__.py", "entities.py", "tracking.py"):
        (tmp_path / "tools" / "mlflow").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tools" / "mlflow" / name).write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path / "tools")
    source = str(Path(__file__).parents[3] / "src")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'tools'}:{source}")
    with logged(run, ["mlflow"], end_seconds=0.2):
        for number in (1, 2, 3):
            step(run, number)
    (event,) = run.read_events()
    assert (event["event"], event["logger"], event["missed"]) == ("logger", "mlflow", 3)


def test_tensorboard_gets_the_curve(run: Run) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with logged(run, ["tensorboard"]):
        for number in (1, 2):
            step(run, number, 3.0 - number)
    with logged(run, ["tensorboard"]):  # the run continues
        step(run, 3, 0.5)
    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    assert [(one.step, one.value, one.wall_time) for one in read.Scalars("loss")] == [
        (1, 2.0, 1e9 + 1),
        (2, 1.0, 1e9 + 2),
        (3, 0.5, 1e9 + 3),
    ]
    assert read.Tags()["scalars"] == ["loss", "mfu"] and run.read_events() == []


def test_mlflow_gets_the_curve_and_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="pip install mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for number, loss in ((1, 2.0), (2, 1.0)):  # the run continues
        sink = open_sink("mlflow", run.path)
        sink.write(number, 1e9, {"loss": loss})
        sink.close()
    client = MlflowClient(f"sqlite:///{run.path / 'mlflow.db'}")
    number = (run.path / "loggers" / "mlflow-id").read_text()
    assert [(one.step, one.value) for one in client.get_metric_history(number, "loss")] == [
        (1, 2.0),
        (2, 1.0),
    ]
    assert client.get_run(number).data.params["train.seed"] == "1"


def test_wandb_without_a_key_writes_into_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(run.path))
    sink = open_sink("wandb", run.path)
    sink.write(1, 1e9, {"loss": 2.0})
    sink.close()
    assert len(list((run.path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
