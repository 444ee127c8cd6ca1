"""If these fail, a curve in another tool has holes or doubles, or that tool holds up a run."""

import importlib.util
import json
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from myriad.cli.command_line import run_command
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.launcher import check_engine
from myriad.launchers.metric_loggers import logged
from myriad.run import Run
from myriad.run.run_exports import record_export
from myriad.telemetry.config import check_loggers
from myriad.telemetry.loggers import MetricForwarder, read_forwarded, scalars_of
from myriad.telemetry.tracker_sinks import RunOutcome

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
        self.told: list[RunOutcome] = []
        self.away, self.closed = away, ""

    def describe(self, outcome: RunOutcome) -> None:
        self.told.append(outcome)

    def write(self, step: int, time: float, scalars: Mapping[str, float]) -> None:
        self._new.append((step, dict(scalars)))

    def flush(self) -> None:
        new, self._new = self._new, []
        if self.away:
            self.away -= 1
            raise ConnectionError("away")
        self.lines += new

    def close(self, state: str) -> None:
        self.closed = state


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
    follower.outcome = RunOutcome("finished", 2, {"loss": 2.0})
    follower.follow(over)
    assert [number for number, _ in kept.lines] == [1, 2] and follower.failures == 0
    assert kept.told == [follower.outcome] and kept.closed == "finished"


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


def train(run: Run, steps: Sequence[int], end: str) -> None:
    """Write what ranks write."""
    run.append_event("start", world=1, device="cpu", peak_flops=100.0)
    for number in steps:
        step(run, number, 3.0 - number)
    run.append_event("validation", step=steps[-1], loss=1.5)
    run.append_event("checkpoint", step=steps[-1])
    run.append_event(end, step=steps[-1])


def resume(run: Run) -> None:
    """Change a key, as a resume may."""
    run.create_or_resume(load_job("tiny", ["optimizer.learning_rate=0.5"]))


def test_tensorboard_gets_the_curve_the_job_the_summary_and_paths(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    with logged(run, ["tensorboard"]):
        train(run, (1, 2), "interrupted")
    record_export(run, run.path / "hf", "step-2", "qwen3")
    resume(run)
    train(run, (3,), "failed")  # without a logger
    capsys.readouterr()
    assert run_command(["runs", "log", str(run.path), "--to", "tensorboard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"missed": {str(run.path): 0}}
    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    assert [(one.step, one.value, one.wall_time) for one in read.Scalars("loss")] == [
        (1, 2.0, 1e9 + 1),
        (2, 1.0, 1e9 + 2),
        (3, 0.0, 1e9 + 3),
    ]
    assert read.Tags()["scalars"] == ["loss", "mfu", "validation_loss"]
    assert [one["event"] for one in run.read_events()].count("logger") == 0
    text = {tag: [_text(one) for one in read.Tensors(tag)] for tag in ("job", "summary", "artifacts")}
    rate = [re.search(r"\| optimizer.learning_rate \| (.*) \|", one) for one in text["job"]]
    assert [found and float(found[1]) for found in rate] == [load_job("tiny").optimizer.learning_rate, 0.5]
    first, last = text["summary"]
    assert "| state | interrupted |" in first and "| state | failed |" in last
    assert "| loss | 0.0 |" in last and "| best_validation | 1.5 |" in last and "| tokens | 21 |" in last
    paths = text["artifacts"][-1]
    assert f"| run | {run.path} |" in paths and "/checkpoints/step-3 |" in paths
    assert f"| export/1 | {run.path / 'hf'} |" in paths
    (start,) = read.Tensors(metadata.SESSION_START_INFO_TAG)[-1:]
    content = read.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    assert start and metadata.parse_session_start_info_plugin_data(content).hparams["train.seed"]


def _text(one: Any) -> str:
    return str(one.tensor_proto.string_val[0].decode())


def follow(run: Run, name: str, outcome: RunOutcome) -> None:
    """Forward what a run has, with the real package in this process."""
    forwarder, over = MetricForwarder(name, run.path), threading.Event()
    forwarder.outcome = outcome
    over.set()
    forwarder.follow(over)
    assert forwarder.failures == 0


ENDS = [
    RunOutcome("interrupted", 1, {"state": "interrupted", "loss": 2.0}, {"run": "/runs/x"}),
    RunOutcome("finished", 2, {"state": "finished", "loss": 1.0}, {"run": "/runs/x", "report": "/runs/x/r"}),
]


def test_mlflow_gets_the_curve_the_job_the_summary_and_paths(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow")
    pytest.importorskip("sqlalchemy", reason="pip install mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    seen = []
    for number, end in enumerate(ENDS, 1):
        step(run, number, 3.0 - number)
        follow(run, "mlflow", end)
        client = MlflowClient(f"sqlite:///{run.path / 'mlflow.db'}")
        found = client.get_run((run.path / "loggers" / "mlflow-id").read_text())
        seen.append((found.info.status, found.data.tags["summary/state"], found.data.metrics["summary/loss"]))
        resume(run)
    assert seen == [("KILLED", "interrupted", 2.0), ("FINISHED", "finished", 1.0)]
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.0), (2, 1.0)]
    assert found.data.params["train.seed"] == "1"
    assert found.data.tags["changed/optimizer.learning_rate"] == "0.5", "MLflow keeps the first value"
    assert found.data.tags["artifacts/report"] == "/runs/x/r"


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole


def test_wandb_without_a_key_writes_all_into_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(run.path))
    for number, end in enumerate(ENDS, 1):
        step(run, number, 3.0 - number)
        follow(run, "wandb", end)
        resume(run)
    config, summary, losses, ended = {}, {}, [], []
    files = sorted(
        (run.path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    )
    for path in files:
        for data in wandb_records(path.read_bytes()):
            record = Record.FromString(data)
            for one in (*record.run.config.update, *record.config.update):
                config[one.key] = json.loads(one.value_json)
            for one in record.summary.update:
                summary[one.key or "/".join(one.nested_key)] = json.loads(one.value_json)
            of_step = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
            losses += [float(of_step["loss"])] if "loss" in of_step else []
            ended += [record.exit.exit_code] if record.WhichOneof("record_type") == "exit" else []
    assert losses == [2.0, 1.0] and ended == [0, 0]
    assert config["optimizer.learning_rate"] == 0.5 and config["train.seed"] == 1
    assert summary["summary/state"] == "finished" and summary["summary/loss"] == 1.0
    assert summary["artifacts/report"] == "/runs/x/r"


def test_an_unknown_tracker_is_refused_by_its_option() -> None:
    with pytest.raises(BadInputError, match=r'--to = "comet": must be one of tensorboard, wandb, mlflow'):
        check_loggers(["comet"], "--to")
