"""The training loop of one rank.

for each step:  program of one iteration (load, forward, backward, reduce, step)  ->  a line of metrics
                now and then: validate, save
a signal on any rank stops all of them after the same step, with a checkpoint
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.session import Loaded, Session, Settings
from myriad.checkpoint.snapshot import Wants
from myriad.checkpoint.start_over import Past
from myriad.comm.groups import close_world, open_world
from myriad.comm.lost_peers import LostPeerError, lost_peers_told
from myriad.data.loader import LoaderClient
from myriad.data.sampler import DataPosition
from myriad.errors import BadInputError, MyriadError, RunFailedError
from myriad.job import dump_toml
from myriad.kernels.agreement import proved
from myriad.model.gpt import GPT
from myriad.optim.config import float8_scaling
from myriad.optim.loss_scale import LossScaler
from myriad.optim.precision import resolve_float8, resolve_precision
from myriad.optim.schedule import learning_rate
from myriad.parallel.captured import CudaGraphs
from myriad.parallel.engine import Engine, StepResult
from myriad.parallel.runtime import Batch
from myriad.program.device_needs import posts_early
from myriad.run import Run
from myriad.spin_watch import watch_spinning
from myriad.telemetry.device_clock import cuda_clock
from myriad.telemetry.progress_page import IN_MEMORY_ONLY, TURNED_CODE, own_row
from myriad.telemetry.spans import Recorder
from myriad.train.attempt_job import attempt_job
from myriad.train.batches import Validation, rank_rows, to_batch
from myriad.train.build import (
    Place,
    find_place,
    fix_order,
    pick_device,
    prepare_cuda,
    settle_links,
    stage_layers,
)
from myriad.train.feed import open_feed, validation_guard
from myriad.train.gap_checks import GapChecks
from myriad.train.garbage import GarbageSchedule
from myriad.train.initial import fill_initial, refuse_other_run
from myriad.train.inputs import (
    bad_blocks_of,
    keep_tokenizer,
    note_corpus,
    open_inputs,
    refuse_other_tokenizer,
    refuse_replaced_corpus,
)
from myriad.train.memory_budget import within_budget
from myriad.train.metrics import StepMeter
from myriad.train.own_spans import open_ring
from myriad.train.peak import PeakTries
from myriad.train.sample import continue_text
from myriad.train.save_clock import SaveClock
from myriad.train.settle_kernels import precision_told, settle_kernels
from myriad.train.settle_tensor import Where, settle_tensor
from myriad.train.spikes import SpikeWatch
from myriad.train.tracing import Tracer
from myriad.train.verify import Verifier

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


def _is_other(place: str, here: str) -> bool:
    """Whether two places of checkpoints differ, however they are written."""
    if place == here:
        return False
    try:
        return CheckpointFolder(place).storage.url != CheckpointFolder(here).storage.url
    except BadInputError:  # a place that cannot be opened any more
        return True


class _HeldError(RunFailedError):
    """The last checkpoint could not be stored; the session has reported where the state is."""


class _StopSignal:
    """Whether somebody asked this rank to stop."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class Trainer:
    """One rank of a run, from its folder to its last step."""

    def __init__(self, run: Run) -> None:
        self.run_folder, self.job = run, attempt_job(run.job())
        job = self.job
        self.place: Place = find_place(job.layout.world, job.comm)
        self.stop = _StopSignal()
        self.progress = own_row()
        self._epoch = int(os.environ.get("MYRIAD_EPOCH", "0"))
        """Number of this attempt, from the driver; 0: there is none."""
        content = self._open_inputs()
        prepare_cuda(job.layout, job.overlap, deterministic=job.train.deterministic)
        self.device = pick_device(job.train.device, job.train.threads, self.place)
        if job.train.deterministic:
            fix_order(self.device)
        self._spin_watch = watch_spinning(torch.get_num_threads()) if self.device.type == "cpu" else None
        skips = not job.overlap.updates_early
        self.dtype = resolve_precision(job.train.precision, self.device, skips_steps=skips)
        value_bytes, on_cpu = self.dtype.itemsize, self.device.type == "cpu"
        self.job, told = within_budget(job, on_cpu=on_cpu, value_bytes=value_bytes)
        job = self.job
        lines = [told, *settle_kernels(job, self.device, self.dtype)]
        self.kernels, doubt = proved(
            job.train.kernels, self.device, self.dtype, float8=float8_scaling(job.train.precision) is not None
        )
        for line in filter(None, [*lines, doubt]):
            _LOG.warning(line)
        self.groups = open_world(job.layout, self.device, comm=job.comm)
        self.recorder = self._open_recorder()
        self.garbage = GarbageSchedule(job.train.collect_garbage_every, self.recorder)
        self.is_first = self.place.rank == 0
        self.tracer = Tracer(run.traces_path, self.place.rank, self.progress, self.device, self.recorder.ring)
        self.session = self._open_session()
        bad_blocks = self.session.agree(bad_blocks_of(run, job) if self.is_first else ())
        self.feed: LoaderClient = open_feed(run, job, self.groups.grid, self.place, content, bad_blocks)
        guard = validation_guard(run, job, self.place, bad_blocks)
        self.validation = Validation(job, self.groups.grid, self.device, guard)
        self.engine = self._build_engine()
        self.verifier = Verifier(self.engine, job, self.progress)
        self.checks = GapChecks(job, self.groups, self.device, self.progress, self.recorder, self._event)
        self.engine.fill_waits(self.checks if self.checks.uses_bubbles else None)
        self.meter = self._build_meter()
        self.clock = SaveClock(job.checkpoint, decides=self.is_first)
        self._waited_for_saves = 0.0
        self.resumed: Loaded | None = None
        self.position = DataPosition(job.train.global_batch)
        self.step = self._resume()
        self.feed.begin(self.step, self.position)
        self._prepare_computes()
        self.engine.before_update = self._before_update
        self._under_way = self.step + 1
        """What is being trained, or saved."""
        self.exit_code = 0
        self._skipped_steps = {int(step) for step in os.environ.get("MYRIAD_SKIP_STEPS", "").split()}
        """Whose batches the driver has found to give no finite numbers, wherever they are computed, or which
        led to a spike."""
        self.spikes = SpikeWatch(job, self._event)

    def _open_inputs(self) -> str:
        """Check what the job reads, and return its `Corpora.content`. `myriad train` has compared the
        tokenizer with the run's; where another launcher (torchrun) has started the ranks, they do."""
        run, job = self.run_folder, self.job
        corpora = open_inputs(job, _LOG.info)
        if self._epoch:
            if self.place.local_rank == 0:
                refuse_replaced_corpus(run, job, corpora.content)
            return corpora.content
        refuse_other_tokenizer(run, job, corpora)
        if self.place.rank == 0:
            keep_tokenizer(run, corpora)
            for change in note_corpus(run, corpora):
                _LOG.warning("changed: %s", change)
        return corpora.content

    def _open_recorder(self) -> Recorder:
        device = cuda_clock() if self.device.type == "cuda" else None
        ring = open_ring(self.run_folder, self.job, self.place, self.groups)
        recorder = Recorder(self.progress, ring, self.place.rank, device)
        recorder.serve()
        return recorder

    def _open_session(self) -> Session:
        run, job = self.run_folder, self.job
        settings = Settings(
            job.checkpoint,
            run=run.path,
            folder=CheckpointFolder(run.checkpoints(job)),
            events=run.events_path.absolute(),
            log=run.logs_path / f"keeper-{self.place.rank}.log",
            job=dump_toml(job),
            compares=job.compares_replicas,
        )
        together = self.groups.on_host("checkpoints")
        return Session(settings, self.groups.grid, self.place.local_rank, together, self.device)

    def _build_engine(self) -> Engine:
        job, layout = self.job, self.job.layout
        definition = GPT(job.model, job.train.seed)
        shape = (layout.micro_batch, job.model.sequence)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        sample = Batch(tokens, tokens, tokens[:, 0])
        kept = self.run_folder.path / "profile.json"
        layers = stage_layers(definition, layout, self.groups, sample, self.dtype, kept)
        where = Where(job, self.groups, self.device, self.dtype, self.kernels)
        overlap = settle_tensor(where, self.run_folder.path / "tensor_overlap.json", self._event)
        links = settle_links(job, self.groups, self.device, self.run_folder.path / "hierarchy.json")
        return Engine(
            definition,
            self.groups,
            layers,
            sample,
            job.shares[self.groups.grid.index("dp")],
            job.optimizer,
            seed=job.train.seed,
            dtype=self.dtype,
            device=self.device,
            recorder=self.recorder,
            overlap=overlap,
            comm=links,
            kernels=self.kernels,
            float8=resolve_float8(job.train.precision, self.kernels),
            loss_scaler=LossScaler(job.loss_scale, job.targets) if self.dtype == torch.float16 else None,
            draws_initial=False,
        )

    def _build_meter(self) -> StepMeter:
        job = self.job
        self.peak_tries = PeakTries(self.device, self.dtype, self.place.local_world, writes=self.is_first)
        tokens = job.targets
        flops = job.model.flops_per_token() * tokens
        return StepMeter(tokens, flops, self._peak_flops(), self.device)

    def _resume(self) -> int:
        """Loads the newest state that memory or storage has, else the weights to begin with, if there are
        any; gives the number of steps done."""
        self.progress.phase("loading")
        self.session.claim(max(self.run_folder.num_starts(), self._epoch - 1) if self.is_first else 0)
        if newest := os.environ.get("MYRIAD_NEWEST_STEP"):
            self.session.distrust(int(newest))
        past = self.session.agree(self.run_folder.past() if self.is_first else Past())
        self.resumed = self.session.resume(list(self.engine.all_rectangles()), past)
        self._tell_past(past)
        step = 0
        if self.resumed is not None:
            step = self.resumed.step
            samples = self.resumed.progress["data"]["samples"]
            self.position = DataPosition.resumed(self.job.train.global_batch, step, samples)
            if self.resumed.source == "storage":
                refuse_other_run(self.run_folder, self.job, step, self.engine)
            self.engine.optimizer.steps_done = self.resumed.progress["optimizer_steps"]
            if self.engine.loss_scaler is not None and "loss_scale" in self.resumed.progress:
                self.engine.loss_scaler.load(self.resumed.progress["loss_scale"])
            self.engine.loaded()
        elif begun := fill_initial(self.run_folder, self.job, self.engine):
            self._event("weights", **begun)
        else:
            self.engine.draw_initial()
        self.session.begin(list(self.engine.rectangles()))
        return step

    def _prepare_computes(self) -> None:
        """On a GPU: kernels are loaded before messages wait on it, and computes become CUDA graphs where the
        job asks for them."""
        train = self.job.train
        if self.device.type == "cuda" and posts_early(self.job.layout, self.job.overlap):
            self.engine.warm_up()
        if train.cuda_graphs and self.device.type == "cuda" and self.step < train.steps:
            self.engine.capture(CudaGraphs(self.device), self._load, self.meter.tokens_per_step)

    def _tell_past(self, past: Past) -> None:
        """What of earlier attempts does not count from here on."""
        if other := self.session.taken_from:
            self._event("taken_over", url=self.job.checkpoint.url, run=other)
        if gone := self.session.set_aside_wrong:
            newest = os.environ.get("MYRIAD_NEWEST_STEP")
            problem = f"states after step {newest} are not gone on from: replicas differed, or a spike came"
            self._event("fault", step=int(newest or 0), problem=problem, set_aside=gone)
        here, step = self.run_folder.checkpoints(self.job), 0 if self.resumed is None else self.resumed.step
        newer = [(where, known) for where, known in past.stored_in if known > step and _is_other(where, here)]
        if newer:
            self._event("older_state", step=step, newer_step=newer[0][1], url=newer[0][0])
        if self.resumed is None and past.done_step:
            self._event("start_over", steps_done=past.done_step, allowed=past.may_start_over)
        elif self.resumed is not None and past.may_start_over:
            self._event("restart_from_scratch", allowed=False, step=self.resumed.step)

    def train(self) -> None:
        """Runs to the last step, or to the step in which somebody asked to stop."""
        self._announce()
        try:
            with lost_peers_told(self.job.comm.timeout_seconds):
                self._run_steps()
        except MyriadError as error:
            watched = self._epoch > 0  # the driver says whose death it was
            if not (isinstance(error, _HeldError) or (watched and isinstance(error, LostPeerError))):
                step = self._under_way
                self._event("fault", step=step, problem=str(error).removeprefix(f"step {step}: "))
            raise

    def _run_steps(self) -> None:
        steps = self.job.train.steps
        if self.step == steps and self.resumed is not None:
            if self._validate_if_due(stopping=False):  # an earlier attempt was stopped before
                self._event("interrupted", step=self.step)
                return
            if self.resumed.source == "memory":
                self._save(is_last=True)  # an earlier attempt could not store it
        while self.step < steps:
            stopping = self._validate_if_due(stopping=self._train_step())
            self._after_step(is_last=self.step == steps, stopping=stopping)
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

    def close(self) -> None:
        """Leaves the loader and the world."""
        self.progress.phase("ending")
        self.tracer.close()
        self.garbage.close()
        self.session.close(for_good=not self.exit_code)
        self.engine.close()
        self.feed.close()
        close_world()
        if self._spin_watch is not None:
            self._spin_watch.close()

    def _announce(self) -> None:
        job = self.job
        resumed: dict[str, Any] = {"resumed_from": self.step} if self.step else {}
        if self._skipped_steps:  # so that they are known where the driver's journal is lost
            resumed["skipped_steps"] = sorted(self._skipped_steps)
        self._event(
            "start",
            world=self.place.world,
            device=str(self.device.type),
            precision=precision_told(job, self.dtype),
            threads=torch.get_num_threads(),
            parameters=job.model.num_parameters(),
            flops_per_token=job.model.flops_per_token(),
            peak_flops=self.meter.peak_flops,
            peak_source=self.peak_tries.peak.source,
            **resumed,
        )
        if self.resumed is not None:
            self._tell_resumed(self.resumed)

    def _tell_resumed(self, found: Loaded) -> None:
        for problem in found.problems:
            self._event("fault", step=found.step, problem=problem, set_aside=list(found.set_aside))
        self._event("resume", step=found.step, source=found.source, seconds=found.seconds)

    def _train_step(self) -> bool:
        """One step; True when all ranks must stop after it (replicas that train alone: where they agree)."""
        self._under_way = self.step + 1
        self.progress.step(self._under_way)
        self.recorder.step(self._under_way)
        started, waited = time.perf_counter(), self.feed.wait_seconds
        rate = learning_rate(self.job.optimizer, self.step, self.job.train.steps)
        result = self._iterate(rate)
        self.step += 1
        self.progress.step_done(self._busy_seconds())
        self.verifier.tell()
        if result.overflow:
            self._report_overflow(result)
        elif result.skipped:
            why = "no finite numbers, or a spike" if self.step in self._skipped_steps else "a spike"
            self._event("skip", step=self.step, problem=f"the batch gives {why}: nothing moved")
        asked = self.clock.hear(result.signal)
        self.session.trust(self.clock.agreed_step)
        seconds = time.perf_counter() - started
        self._measure_peak(seconds)
        if self.is_first:
            waited = self.feed.wait_seconds - waited
            saved = self.session.waited_seconds - self._waited_for_saves
            self._waited_for_saves += saved
            tokens = self.position.samples_before(self.step) * self.job.model.sequence
            line = self.meter.line(self.step, tokens, result, rate, seconds, waited, saved, self.recorder)
            self.run_folder.append_metrics(line)
        return asked and self._agrees

    def _report_overflow(self, result: StepResult) -> None:
        assert self.engine.loss_scaler is not None, "nothing else overflows"
        before, after = result.loss_scale, self.engine.loss_scaler.scale
        self._event("overflow", step=self.step, loss_scale=before, next_loss_scale=after)

    def _peak_flops(self) -> float:
        """Peak FLOP/s of all ranks together."""
        return self.peak_tries.peak.flops_per_second * self.place.world

    def _measure_peak(self, step_seconds: float) -> None:
        """Raise the peak where this step, or a measurement after it, was faster."""
        rate = self.meter.flops_per_step / step_seconds / self.place.world
        if self.peak_tries.after_step(self.step, rate):
            self.meter = replace(self.meter, peak_flops=self._peak_flops())
            source = self.peak_tries.peak.source
            self._event("peak", step=self.step, peak_flops=self.meter.peak_flops, peak_source=source)

    def _iterate(self, rate: float) -> StepResult:
        def run(refuses: Callable[[float, float], bool] | None, *, skip: bool = False) -> StepResult:
            return self.engine.train_step(
                self._load,
                rate,
                self.meter.tokens_per_step,
                signal=self._signal(),
                step=self._under_way,
                skip=skip,
                refuses=refuses,
            )

        if self._under_way in self._skipped_steps:
            return run(None, skip=True)
        return self.spikes.run(self._under_way, run)

    def _before_update(self) -> None:
        self.session.settle()
        self.verifier.take(self.step)

    def _signal(self) -> float:
        turn = self.is_first and self.progress.turns
        ends = self.stop.asked or turn
        check = (
            self.is_first and not ends and self.checks.is_due(self._under_way, save_due=self.clock.save_comes)
        )
        return self.clock.signal(self.stop.asked, self.progress.agreed_step(), turn=turn, check=check)

    def _busy_seconds(self) -> float:
        """Return the seconds that this rank computed; 0 for one that is profiled: it is not compared with
        others."""
        busy = self.recorder.take_busy()
        return 0.0 if self.tracer.is_on else busy

    @property
    def _turns(self) -> bool:
        """All ranks end here, and the next attempt goes on from their memory."""
        return self.clock.turn_due and self._agrees and self.step < self.job.train.steps

    def _load(self) -> Batch:
        job, grid = self.job, self.groups.grid
        rows = rank_rows(job, grid.index("dp"))
        own = self.feed.rows(self.step, rows.start, rows.stop)
        return to_batch(job, own, self.position.samples_before(self.step) + rows.start, self.device)

    def _validate_if_due(self, *, stopping: bool) -> bool:
        """Validate after this step, unless all ranks stop; return whether they do."""
        train = self.job.train
        is_due = train.validate_every and self.step % train.validate_every == 0
        if stopping or not (is_due or self.step == train.steps):
            return stopping
        return not self._validate() and self._agrees

    def _after_step(self, *, is_last: bool, stopping: bool) -> None:
        if self._agrees:
            self._save(is_last=is_last or stopping)

    @property
    def _agrees(self) -> bool:
        """Replicas that train alone hold the same at this step."""
        return self.step % self.job.comm.sync_every == 0

    def _validate(self) -> bool:
        """Return False when some rank was asked to stop before the last batch: nothing is recorded then."""
        total, stops, began = 0.0, False, time.perf_counter()
        with self.progress.within("validating"), self.recorder.span("evaluate"):
            for index in range(self.validation.num_batches):
                batch = partial(self.validation.batch, index)
                loss, stops = self.engine.evaluate(batch, stops=self.stop.asked)
                total += loss
                if stops:
                    return False
        if self.validation.num_batches == 0:
            return True
        loss = total / self.validation.num_targets
        bits, seconds = self.validation.bits_per_byte(loss), time.perf_counter() - began
        self._event("validation", step=self.step, loss=loss, bits_per_byte=bits, seconds=seconds)
        return True

    def _save(self, *, is_last: bool) -> None:
        due, memory_due = self.clock.save_due, self.clock.memory_due
        self._under_way = self.step
        is_last |= self._turns and not self.job.checkpoint.memory_every
        wants = self.session.wants(self.step, is_last=is_last, due=due, memory_due=memory_due)
        if self._turns and not is_last:
            wants = self.session.parting_wants()
        if wants is None:
            return
        samples = self.position.samples_before(self.step)
        progress: dict[str, Any] = {
            "step": self.step,
            "optimizer_steps": self.engine.optimizer.steps_done,
            "data": {"samples": samples, "tokens": samples * self.job.model.sequence},
        }
        if (scaler := self.engine.loss_scaler) is not None:
            progress["loss_scale"] = scaler.state()
        with self.progress.within("saving"):
            self._take(progress, wants, is_last=is_last)

    def _take(self, progress: Mapping[str, Any], wants: Wants, *, is_last: bool) -> None:
        with self.recorder.span("checkpoint_copy"):
            self.session.take(self.step, progress, wants)
        self.clock.taken(wants)
        if is_last or (wants.durable and not self.job.overlap.checkpoint):
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
