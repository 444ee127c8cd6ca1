"""If this fails, a crash, a power cut or a full disk leaves a run that cannot be read or resumed.

The real writers write to a disk that fails wherever hypothesis likes (`crashing_disk`); then the real readers
open what is there, and the next process goes on with it.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from crashing_disk import Crash, CrashingDisk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.format.stored_shard import StoredShard
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.checkpoint.storage.verified_files import put_and_check, write_and_check
from myriad.job import load_job
from myriad.reports.run_report.run_summary import summarize
from myriad.run import Run
from myriad.run.run_lines import StepLines, count_steps
from myriad.supervise.accounting.accounting import account_of
from myriad.supervise.accounting.ledger import in_order
from myriad.supervise.driver.journal import Journal, count_missing
from myriad.supervise.policy.policy_actions import StartAttempt
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.system.jsonl import JsonlTail
from myriad.system.whole_file import read_json, write_whole
from myriad.telemetry.shipping.outlets import FileWriter
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_files import read_span_file, span_files
from myriad.telemetry.span_io.span_records import RECORD

_JOBS = [load_job("tiny", [f"train.steps={steps}"]) for steps in (400, 500)]
_START = StartAttempt(rule="all are there", epoch=1, placement={0: (0,)}, again=False)
_STEPS = 400


class RunFolder(RuleBasedStateMachine):
    """One run, trained by one process after another."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="myriad-crash-"))
        self.disk = CrashingDisk(self.root)
        self.power, self.keep, self.nuls, self.was_cut = False, 0.0, False, False
        self.lines: set[tuple[int, int]] = set()
        """(attempt, step) of each line that was ever offered."""
        self.written: list[tuple[int, int]] = []
        """Those of them that are in the file, as far as the writer knows; not synced."""
        self.events: set[int] = set()
        self.committed: set[int] = set()
        self.offered_steps: set[int] = set()
        self.values: list[int | None] = [None]
        """Of peak.json: the last that was acknowledged, and those that were tried after it."""
        self.epoch, self.acknowledged, self.missing_allowed = 0, 0, 0
        self.spans: set[int] = set()
        self.job, self.attempt, self.num_spans = _JOBS[0], 0, 0
        self.begun = False
        self._open()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    # The process and its end

    def _do(self, work: Callable[[], Any]) -> bool:
        """Whether the process lives; a crash is followed by the next process."""
        try:
            with self.disk.in_use():
                work()
            return True
        except Crash:
            self._crash()
            return False

    def _crash(self) -> None:
        if self.power:
            self.was_cut = True
            self.disk.cut_power(self.keep, self.nuls)
            self.written = []
            self.spans = set()
        self.disk.room = None
        self.disk.reboot()
        self._check()
        self._open()

    def _open(self) -> None:
        """A process continues with the files that exist."""
        self.run = Run(self.root / "run")
        self.journal = Journal(self.run.path / "journal.jsonl")
        self.writer = FileWriter(self.run.spans_path, "node-0", None)
        self.folder = CheckpointFolder(self.run.checkpoints_path)
        with self.disk.in_use():
            self.run.create_or_resume(self.job)
            self.begun = True
            self.journal.begin(RunPlan(world=1, nodes=1, first_epoch=self.epoch + 1))
        self.acknowledged = 0
        found = self.folder.newest()
        self.step = 0 if found is None else found[0]
        self.attempt += 1
        self._event("start", **({"resumed_from": self.step} if self.step else {}))

    def _tick(self) -> float:
        return time.time()

    def _event(self, event: str, **fields: Any) -> None:
        number = len(self.events)
        self.events.add(number)
        self.run._events.append({"time": self._tick(), "event": event, "number": number, **fields})

    # What a run writes

    @rule(count=st.integers(1, 4))
    def train(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            mine = (self.attempt, self.step)
            self.lines.add(mine)
            line = {"time": self._tick(), "step": self.step, "attempt": self.attempt, "loss": 1.0 / self.step}
            if not self._do(lambda line=line: self.run.append_metrics(line)):
                return
            self._note_written()

    def _note_written(self) -> None:
        if not self.run._metrics.num_waiting:
            self.written = [one for one in self.lines if one[0] == self.attempt]

    @rule(text=st.text(max_size=20))
    def tell(self, text: str) -> None:
        self._do(lambda: self._event("note", text=text))

    @rule()
    def decide(self) -> None:
        self.epoch += 1
        state = RunState("running", self.epoch)

        def write() -> None:
            try:
                self.journal.append(self.journal.entry([_START], state))
            except OSError:
                return
            self.acknowledged = self.epoch

        self._do(write)

    @rule()
    def retry(self) -> None:
        self._do(lambda: (self.journal.retry(), self.run.flush_lines()))
        if not self.journal.num_waiting:
            self.acknowledged = max(self.acknowledged, self.epoch if self.acknowledged else 0)

    @rule(value=st.integers(0, 10**6))
    def replace_whole(self, value: int) -> None:
        self.values.append(value)

        def write() -> None:
            try:
                write_whole(self.run.path / "peak.json", json.dumps({"here": value}))
            except OSError:
                return
            self.values = [value]

        self._do(write)

    @rule(job=st.sampled_from(_JOBS))
    def change_job(self, job: Any) -> None:
        def write() -> None:
            try:
                self.run.create_or_resume(job)
            except Exception:
                return
            self.job = job

        self._do(write)

    @precondition(lambda self: self.step > 0)
    @rule(size=st.integers(1, 9000))
    def save(self, size: int) -> None:
        step = self.step
        if step in self.committed:
            return
        self.offered_steps.add(step)

        def write() -> None:
            try:
                self._commit(step, size)
            except OSError:
                return
            self.committed.add(step)

        self._do(write)

    def _commit(self, step: int, size: int) -> None:
        checkpoint = self.folder.begin(step)
        piece = StoredShard("t", (size,), "uint8", (0,), (size,), size, 0, b"head", b"tail")
        data = memoryview(b"\x07" * size)
        files = {
            "__0_0.distcp": write_and_check(
                self.folder.storage, checkpoint.at("__0_0.distcp"), [piece], lambda piece: data
            ),
            "job.toml": put_and_check(self.folder.storage, checkpoint.at("job.toml"), b"x = 1\n"),
        }
        tensors = {"t": {"shape": [size], "dtype": "uint8"}}
        checkpoint.commit(CheckpointManifest(step, 1, 0.0, {}, {}, {}, {}, tensors, files))

    @rule()
    def ship_spans(self) -> None:
        records = np.zeros(3, RECORD)
        self.num_spans += 1
        records["step"], records["duration_ns"] = self.num_spans, 5
        records["start_ns"] = 10**18

        def write() -> None:
            try:
                self.writer.write([SpanBatch(0, self.attempt, ("forward",), records)])
            except OSError:
                return
            self.spans.add(self.num_spans)

        self._do(write)

    # What goes wrong

    @rule(
        after=st.integers(0, 12), part=st.floats(0, 1), power=st.booleans(), keep=st.floats(0, 1),
        nuls=st.booleans(),
    )  # fmt: skip
    def crash_soon(self, after: int, part: float, power: bool, keep: float, nuls: bool) -> None:
        self.disk.crash_after, self.disk.part = after, part
        self.power, self.keep, self.nuls = power, keep, nuls

    @rule(power=st.booleans(), keep=st.floats(0, 1), nuls=st.booleans())
    def crash_now(self, power: bool, keep: float, nuls: bool) -> None:
        self.power, self.keep, self.nuls = power, keep, nuls
        self._crash()

    @rule(room=st.integers(0, 700))
    def fill(self, room: int) -> None:
        self.disk.room = room

    @rule()
    def free(self) -> None:
        self.disk.room = None

    @rule()
    def stop(self) -> None:
        """At the end of a process: one more try, and another process."""
        self._do(lambda: self.run.flush_lines())
        if not self.run.num_waiting:
            self._note_written()
        self.power = False
        self._crash()

    # What must hold

    @invariant()
    def holds(self) -> None:
        if self.begun:
            self._check()

    def _check(self) -> None:
        self._check_job()
        steps = StepLines(self.run.metrics_path)
        offered = self._check_metrics(steps)
        events = self._check_events()
        self._check_journal()
        self._check_whole_files()
        self._check_checkpoints()
        self._check_spans()
        account = account_of(in_order(events, offered, JsonlTail(self.journal.path).poll()))
        count, summary = count_steps(steps.lines, events), summarize(self.run)
        assert (account.steps, account.steps_without_line) == (count.done, count.without_line)
        assert (summary.steps, summary.steps_without_line) == (count.done, count.without_line)
        assert 0 <= account.effective_ratio <= 1 and account.steps <= _STEPS * 10

    def _check_job(self) -> None:
        assert self.run.job() in _JOBS

    def _check_metrics(self, steps: StepLines) -> list[dict[str, Any]]:
        offered = steps.poll()
        found = [(line["attempt"], line["step"]) for line in offered]
        assert set(found) <= self.lines and all(line["loss"] == 1.0 / line["step"] for line in offered)
        assert found == sorted(set(found)), "in order, each once"
        assert set(self.written) <= set(found), "what was written is there"
        in_effect = [line["step"] for line in steps.lines]
        assert in_effect == sorted(set(in_effect))
        return offered

    def _check_events(self) -> list[dict[str, Any]]:
        events = self.run.read_events()
        numbers = [event["number"] for event in events if "number" in event]
        assert set(numbers) <= self.events and len(numbers) == len(set(numbers))
        return [event for event in events if "number" in event]

    def _check_journal(self) -> None:
        plan, state = self.journal.replay()
        assert plan.world == 1
        assert (0 if state is None else state.epoch) >= self.acknowledged
        assert count_missing(self.journal.records()) == 0, "none was dropped"

    def _check_whole_files(self) -> None:
        found = read_json(self.run.path / "peak.json")
        assert (None if found is None else found["here"]) in self.values

    def _check_checkpoints(self) -> None:
        steps = set(self.folder.steps())
        assert self.committed <= steps <= self.offered_steps
        assert not [problem for step in steps for problem in verify(self.folder.at_step(step))]

    def _check_spans(self) -> None:
        found = set()
        for path in span_files(self.run.spans_path):
            try:
                found |= set(read_span_file(path).records["step"].tolist())
            except BatchError:
                assert self.was_cut, "only a power cut tears a file of spans"
        assert self.spans <= found


TestRunFolder = RunFolder.TestCase
TestRunFolder.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
