"""The training loop of one rank.

for each step:  program of one iteration (load, forward, backward, reduce, step)  ->  a line of metrics
                when due: validate, evaluate, save
a stop signal on any rank stops all ranks after the same step, with a checkpoint
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from myriad.checkpoint.session import CheckpointSession, LoadedState, SessionSettings
from myriad.checkpoint.snapshots.server_start import start_snapshot_server
from myriad.checkpoint.snapshots.snapshot_server_process import ServerThread
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.lost_peer_errors import LostPeerError, report_lost_peers
from myriad.data.loader import LoaderClient
from myriad.data.loader_process import LoaderThread
from myriad.data.windows import BatchWords
from myriad.errors import MyriadError, RunFailedError
from myriad.job import dump_toml
from myriad.job.job_steps import JobSteps
from myriad.parallel.batch import Batch
from myriad.parallel.cuda_graphs import CudaGraphs
from myriad.parallel.optimizer_step import StepResult
from myriad.program.device_needs import posts_early
from myriad.run import Run
from myriad.system.software import software_versions
from myriad.system.user_metrics import take_logged
from myriad.telemetry.progress.progress_page import IN_MEMORY_ONLY, TURNED_CODE
from myriad.train.checkpoint_tools.text_sampler import continue_text
from myriad.train.data_loader import open_feed, rank_rows, to_batch, validation_guard
from myriad.train.device_setup import describe_precision
from myriad.train.engine_setup import build_engine
from myriad.train.inputs import (
    BadBlocks,
    bad_blocks_of,
)
from myriad.train.loss_spikes import SpikePolicy
from myriad.train.metrics import BatchWork, PeakFlopsTracker, StepMeter, document_work
from myriad.train.phase_changes import PhaseChanges
from myriad.train.rank_context import open_rank
from myriad.train.rank_profiler import Tracer
from myriad.train.replica_digests import DigestPublisher
from myriad.train.resume import resume
from myriad.train.step_signals import GarbageSchedule, SaveClock
from myriad.train.training_checks import TrainingChecks

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


class _HeldError(RunFailedError):
    """The last checkpoint could not be stored; the session has reported where the state is."""


class Trainer:
    """Train one rank of a run, from the run folder to the last step."""

    def __init__(
        self, run: Run, *, in_process: bool = False, on_step: Callable[[], None] = lambda: None
    ) -> None:
        """Open the run and build this rank's engine, loader and checkpoint session.

        With ``in_process``, the loader and the snapshot server are threads of this process, not processes
        (`myriad.train.in_process`). ``on_step`` is called after each step.
        """
        self._in_process, self._on_step, self._at_close = in_process, on_step, contextlib.ExitStack()
        try:
            self._build(run)
        except BaseException:
            if in_process:  # the process goes on, with its own signal handlers and without our threads
                self._at_close.close()
            raise

    def _build(self, run: Run) -> None:
        self.rank = rank = open_rank(run, self._at_close, in_process=self._in_process)
        self.run_folder, self.job, self.place = run, rank.job, rank.place
        self.device, self.groups, self.recorder = rank.device, rank.groups, rank.recorder
        self.stop, self.progress, self.is_first = rank.stop, rank.progress, rank.is_first
        job = self.job
        self.garbage = GarbageSchedule(job.train.collect_garbage_every, self.recorder)
        self.tracer = Tracer(run.traces_path, self.place.rank, self.progress, self.device, self.recorder.ring)
        self.session = self._open_session()
        bad_blocks = self.session.agree(bad_blocks_of(run, job) if self.is_first else (), BadBlocks)
        start = LoaderThread if self._in_process else None
        steps = JobSteps(job)
        self.feed: LoaderClient = open_feed(run, steps, self.place, rank.contents, bad_blocks, start)
        self._at_close.callback(self.feed.close)
        guard = validation_guard(run, job, self.place, bad_blocks)
        self.engine = build_engine(rank, self._event)
        self.phases = PhaseChanges(rank, self.engine, guard, self._event)
        self.verifier = DigestPublisher(self.engine, job, self.progress)
        self.checks = TrainingChecks(job, self.groups, self.device, self.progress, self.recorder, self._event)
        self.engine.fill_waits(self.checks if self.checks.uses_bubbles else None)
        self.meter = self._build_meter()
        self.clock = SaveClock(job.checkpoint, decides=self.is_first)
        self._waited_for_saves = 0.0
        self._relative_work = 1.0
        self.progress.phase("loading")
        begins = resume(rank, self.engine, self.session, self._event)
        self.step, self.position, self.resumed = begins.step, begins.position, begins.state
        self.feed.begin(self.step, self.position)
        self.spikes = SpikePolicy(job, self._event)
        self._enter_phase()
        self._prepare_computes()
        self.engine.before_update = self._before_update
        self._under_way = self.step + 1
        """The step that is being trained or saved."""
        self.exit_code = 0
        self._skipped_steps = {int(step) for step in os.environ.get("MYRIAD_SKIP_STEPS", "").split()}
        """Steps whose batches the driver excludes: they give non-finite numbers wherever they are
        computed, or they caused a loss spike."""

    def _open_session(self) -> CheckpointSession:
        run, job = self.run_folder, self.job
        settings = SessionSettings(
            job.checkpoint,
            run=run.path,
            folder=CheckpointFolder(run.checkpoints(job)),
            events=run.events_path.absolute(),
            log=run.logs_path / f"keeper-{self.place.rank}.log",
            job=dump_toml(job),
            compares=job.compares_replicas,
            holders=job.snapshot_holders,
            encrypts=job.resilience.encrypt,
            start=ServerThread if self._in_process else start_snapshot_server,
        )
        together = self.groups.on_host("checkpoints")
        return CheckpointSession(settings, self.groups.grid, self.place.local_rank, together, self.device)

    def _build_meter(self) -> StepMeter:
        job = self.job
        self.peak_tracker = PeakFlopsTracker(
            self.device, self.rank.dtype, self.place.local_world, writes=self.is_first
        )
        return StepMeter(self._peak_flops(), self.device, job.model)

    def _enter_phase(self) -> None:
        """Change to the values that the job has at the next step."""
        if self.phases.enter(self.step):
            self.meter = replace(self.meter, model=self.phases.now.model)
            self.spikes.forget()

    def _prepare_computes(self) -> None:
        """On a GPU, load the kernels before messages wait for the device, and capture compute actions as
        CUDA graphs if the job asks for them."""
        train = self.job.train
        if self.device.type == "cuda" and posts_early(self.job.layout, self.job.overlap):
            self.engine.warm_up()
        if train.cuda_graphs and self.device.type == "cuda" and self.step < train.steps:
            self.engine.capture(
                CudaGraphs(self.device, self.job.layout.tp), self._load, self._work_of_step().num_targets
            )

    def train(self) -> None:
        """Train to the last step, or to the step in which a stop was requested."""
        self._announce()
        take_logged()  # values from before this run
        try:
            with report_lost_peers(self.job.comm.timeout_seconds):
                self._run_steps()
        except MyriadError as error:
            watched = self.rank.attempt > 0  # the driver reports the cause of the lost peer
            if not (isinstance(error, _HeldError) or (watched and isinstance(error, LostPeerError))):
                step = self._under_way
                self._event("fault", step=step, problem=str(error).removeprefix(f"step {step}: "))
            raise

    def _run_steps(self) -> None:
        steps = self.job.train.steps
        if self.step == steps and self.resumed is not None:
            if self._validate_if_due(stopping=False):  # an earlier attempt was stopped before the validation
                self._event("interrupted", step=self.step)
                return
            if self.resumed.source == "memory":
                self._save(is_last=True)  # an earlier attempt could not store the checkpoint
        while self.step < steps:
            stopping = self._validate_if_due(stopping=self._train_step())
            self._after_step(is_last=self.step == steps, stopping=stopping)
            self._on_step()
            ends = stopping or self._turns or self.step == steps
            self.checks.after_step(self.step, due=self.clock.check_due and not ends)
            self.garbage.after_step(self.step)
            self.tracer.after_step(self.step)
            if self._turns and not stopping:
                self.verifier.finish(self.step)
                self.exit_code = TURNED_CODE
                return
            if stopping:
                self.verifier.finish(self.step)
                self._event("interrupted", step=self.step)
                return
        self.verifier.finish(self.step)
        self._finish()

    def close(self, *, failed: bool = False) -> None:
        """Close the loader, the session and the process groups.

        After an error (``failed``, in process), the snapshot server stores the newest snapshot, or goes on
        holding a last step that could not be stored."""
        self.progress.phase("ending")
        with self._at_close:  # in reverse order, each also if one before it fails
            self._at_close.callback(self.engine.close)
            self._at_close.callback(self.session.leave if failed else self._end_session)
            self._at_close.callback(self.garbage.close)
            self._at_close.callback(self.tracer.close)

    def _end_session(self) -> None:
        self.session.close(for_good=not self.exit_code)

    def _announce(self) -> None:
        job = self.job
        resumed: dict[str, Any] = {"resumed_from": self.step} if self.step else {}
        if self._skipped_steps:  # the record survives a loss of the driver's journal
            resumed["skipped_steps"] = sorted(self._skipped_steps)
        self._event(
            "start",
            world=self.place.world,
            device=str(self.device.type),
            precision=describe_precision(job, self.rank.dtype),
            threads=torch.get_num_threads(),
            parameters=job.model.num_parameters(),
            flops_per_token=job.model.flops_per_token(),
            peak_flops=self.meter.peak_flops,
            peak_source=self.peak_tracker.peak.source,
            host=socket.gethostname(),
            software=software_versions() if self.is_first else {},
            **resumed,
        )
        if self.resumed is not None:
            self._report_resumed(self.resumed)

    def _report_resumed(self, found: LoadedState) -> None:
        for problem in found.problems:
            self._event("fault", step=found.step, problem=problem, set_aside=list(found.set_aside))
        self._event("resume", step=found.step, source=found.source, seconds=found.seconds)

    def _train_step(self) -> bool:
        """Train one step, and return whether all ranks must stop after it.

        With ``comm.sync_every`` > 1, ranks stop only at a step where replicas hold the same state.
        """
        self._enter_phase()
        self._under_way = self.step + 1
        self.progress.step(self._under_way)
        self.recorder.step(self._under_way)
        started, waited = time.perf_counter(), self.feed.wait_seconds
        rate = self.phases.steps.learning_rate(self.step)
        work = self._work_of_step()
        result = self._iterate(rate, work.num_targets)
        self.step += 1
        self.progress.step_done(self._busy_seconds())
        self.verifier.publish()
        if result.overflow:
            self._report_overflow(result)
        elif result.skipped:
            why = "no finite numbers, or a spike" if self.step in self._skipped_steps else "a spike"
            self._event("skip", step=self.step, problem=f"the batch gives {why}: nothing moved")
        asked = self.clock.receive(result.signal)
        self.session.trust(self.clock.agreed_step)
        seconds = time.perf_counter() - started
        self._measure_peak(seconds, work)
        if self.is_first:
            waited = self.feed.wait_seconds - waited
            saved = self.session.waited_seconds - self._waited_for_saves
            self._waited_for_saves += saved
            tokens = self._tokens_done()
            times = (rate, seconds, waited, saved)
            line = self.meter.line(self.step, tokens, work, result, *times, self.recorder)
            self.run_folder.append_metrics(line)
        return asked and self._agrees

    def _tokens_done(self) -> int:
        """Return the tokens of all steps done, padding included."""
        before = self.position.first_sample * self.job.model.sequence  # 0 unless a resume changed the batch
        return before + self.phases.steps.tokens_before(self.step)

    def _report_overflow(self, result: StepResult) -> None:
        assert self.engine.loss_scaler is not None, "nothing else overflows"
        before, after = result.loss_scale, self.engine.loss_scaler.scale
        self._event("overflow", step=self.step, loss_scale=before, next_loss_scale=after)

    def _peak_flops(self) -> float:
        """Return the peak FLOP/s of all ranks together."""
        return self.peak_tracker.peak.flops_per_second * self.place.world

    def _measure_peak(self, step_seconds: float, work: BatchWork) -> None:
        """Raise the peak if this step, or a measurement after it, was faster."""
        rate = work.flops / step_seconds / self.place.world
        if self.peak_tracker.after_step(self.step, rate):
            self.meter = replace(self.meter, peak_flops=self._peak_flops())
            source = self.peak_tracker.peak.source
            self._event("peak", step=self.step, peak_flops=self.meter.peak_flops, peak_source=source)

    def _iterate(self, rate: float, num_targets: int) -> StepResult:
        excluded = self._under_way in self._skipped_steps

        def run() -> StepResult:
            return self.engine.train_step(
                self._load,
                rate,
                num_targets,
                signal=self._signal(),
                step=self._under_way,
                skip=excluded,
                refuses=self.spikes.refuses,
            )

        result = run()
        return result if excluded else self.spikes.review(self._under_way, result, run)

    def _before_update(self) -> None:
        self.session.settle()
        self.verifier.take(self.step)

    def _signal(self) -> float:
        turn = self.is_first and self.progress.restart_requested
        ends = self.stop.asked or turn
        check = (
            self.is_first and not ends and self.checks.is_due(self._under_way, save_due=self.clock.save_comes)
        )
        return self.clock.signal(self.stop.asked, self.progress.agreed_step(), turn=turn, check=check)

    def _busy_seconds(self) -> float:
        """Return the seconds that this rank would have computed with average documents, or 0 while it is
        profiled, so that it is not compared with other ranks."""
        busy = self.recorder.take_busy() / self._relative_work
        return 0.0 if self.tracer.is_on else busy

    @property
    def _turns(self) -> bool:
        """Whether all ranks end after this step, so that the next attempt resumes from their memory."""
        return self.clock.restart_due and self._agrees and self.step < self.job.train.steps

    def _work_of_step(self) -> BatchWork:
        """Return the work of the next step. With packed documents it waits for the step's batch."""
        if self.job.data.documents == "joined":
            return BatchWork.of_windows(self.phases.now)
        return BatchWork.of_documents(BatchWords.read(self.feed.get(self.step)[0]), self.phases.now.model)

    def _load(self) -> Batch:
        job, grid = self.phases.now, self.groups.grid
        rows = rank_rows(job, grid.index("dp"))
        own = self.feed.rows(self.step, rows.start, rows.stop)
        batch = to_batch(job, own, self.position.samples_before(self.step), rows.start, self.device)
        if batch.documents is not None:
            self._relative_work = document_work(job, BatchWords.read(own[0]), batch.documents.lengths)
        return batch

    def _validate_if_due(self, *, stopping: bool) -> bool:
        """Validate and evaluate after this step where due, unless all ranks stop; return whether all ranks
        stop."""
        job = self.job
        for every, check in ((job.train.validate_every, self._validate), (job.eval.every, self._evaluate)):
            is_due = every and self.step % every == 0
            if not stopping and (is_due or self.step == job.train.steps):
                stopping = not check() and self._agrees
                take_logged()  # values of an evaluation are none of the next step
        return stopping

    def _after_step(self, *, is_last: bool, stopping: bool) -> None:
        if self._agrees:
            self._save(is_last=is_last or stopping)

    @property
    def _agrees(self) -> bool:
        """Whether all replicas hold the same state after this step (always, unless ``comm.sync_every`` >
        1)."""
        return self.step % self.job.comm.sync_every == 0

    def _validate(self) -> bool:
        """Validate, and return False if a rank was asked to stop before the last batch. Nothing is
        recorded in that case."""
        with self.progress.within("validating"), self.recorder.span("evaluate"):
            found = self.phases.evaluation.validate(self.engine, lambda: self.stop.asked, self.session.settle)
        for fields in found or ():
            self._event(**fields, step=self.step)
        return found is not None

    def _evaluate(self) -> bool:
        """Score the model on the job's tasks, and return False if a rank was asked to stop before the last
        batch. Nothing is recorded in that case."""
        if self.phases.evaluation.tasks.is_empty:
            return True
        with self.progress.within("validating"), self.recorder.span("evaluate"):
            found = self.phases.evaluation.score(self.engine, lambda: self.stop.asked)
        if found is not None:
            self._event("evaluation", step=self.step, **found)
        return found is not None

    def _save(self, *, is_last: bool) -> None:
        due, memory_due = self.clock.save_due, self.clock.memory_due
        self._under_way = self.step
        is_last |= self._turns and not self.job.checkpoint.memory_every
        purpose = self.session.purpose(self.step, is_last=is_last, due=due, memory_due=memory_due)
        if self._turns and not is_last:
            purpose = self.session.final_purpose()
        if purpose is None:
            return
        samples = self.position.samples_before(self.step)
        progress: dict[str, Any] = {
            "step": self.step,
            **self.engine.progress(),
            "data": {"samples": samples, "tokens": self._tokens_done()},
        }
        with self.progress.within("saving"):
            self._take(progress, purpose, is_last=is_last)

    def _take(self, progress: Mapping[str, Any], purpose: SnapshotPurpose, *, is_last: bool) -> None:
        with self.recorder.span("checkpoint_copy"):
            self.session.take(self.step, progress, purpose)
        self.clock.taken(purpose)
        if is_last or (purpose.durable and not self.job.overlap.checkpoint):
            problem = self.session.finish(self.step, retry=is_last)
            if problem and is_last:
                self.session.hold(self.step, problem)
                raise _HeldError(f"{IN_MEMORY_ONLY}: {problem}")

    def _finish(self) -> None:
        self.progress.phase("ending")
        if self.is_first and self.job.train.sample_prompt is not None:
            text = continue_text(self.run_folder, self.job.train.sample_prompt)
            self._event("sample", prompt=self.job.train.sample_prompt, text=text)
        self._event("finish", step=self.step)

    def _event(self, event: str, **fields: Any) -> None:
        if self.is_first:
            self.run_folder.append_event(event, **fields)
