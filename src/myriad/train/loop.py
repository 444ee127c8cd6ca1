"""The training loop of one rank.

for each step:  program of one iteration (load, forward, backward, reduce, step)  ->  a line of metrics
                now and then: validate, save
a signal on any rank stops all of them after the same step, with a checkpoint
"""

import logging
import signal
import time
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.store import load
from myriad.comm.groups import close_world, open_world
from myriad.comm.lost_peers import lost_peers_told
from myriad.data.loader import LoaderClient
from myriad.errors import MyriadError
from myriad.model.gpt import GPT
from myriad.optim.precision import resolve_precision
from myriad.optim.schedule import learning_rate
from myriad.parallel.engine import Engine, StepResult
from myriad.parallel.runtime import Batch
from myriad.run import Run
from myriad.telemetry.spans import Recorder
from myriad.train.batches import Validation, rank_rows, to_batch
from myriad.train.build import Place, find_place, pick_device, settle_links, stage_layers
from myriad.train.feed import open_feed
from myriad.train.garbage import GarbageSchedule
from myriad.train.initial import fill_initial
from myriad.train.inputs import open_inputs
from myriad.train.metrics import StepMeter
from myriad.train.peak import Peak, find_peak
from myriad.train.sample import continue_text
from myriad.train.saving import Saved, Saver

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


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
        self.run_folder, self.job = run, run.job()
        job = self.job
        self.place: Place = find_place(job.layout.world)
        self.stop = _StopSignal()
        open_inputs(job, _LOG.info)
        self.device = pick_device(job.train.device, job.train.threads, self.place)
        self.dtype = resolve_precision(job.train.precision, self.device)
        self.groups = open_world(job.layout, self.device, comm=job.comm)
        self.recorder = Recorder()
        self.garbage = GarbageSchedule(job.train.collect_garbage_every, self.recorder)
        self.is_first = self.place.rank == 0
        self.feed: LoaderClient = open_feed(run, job, self.groups.grid, self.place)
        self.validation = Validation(job, self.groups.grid, self.device)
        self.engine = self._build_engine()
        self.checkpoints = CheckpointFolder(run.checkpoints_path)
        together = self.groups.on_host("checkpoints")
        self.saver = Saver(
            self.checkpoints, self.job.checkpoint.keep, together, background=self.job.overlap.checkpoint
        )
        self.meter = self._build_meter()
        self.step = self._resume()

    def _build_engine(self) -> Engine:
        job, layout = self.job, self.job.layout
        definition = GPT(job.model, job.train.seed)
        shape = (layout.micro_batch, job.model.sequence)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        sample = Batch(tokens, tokens, tokens[:, 0])
        kept = self.run_folder.path / "profile.json"
        layers = stage_layers(definition, layout, self.groups, sample, self.dtype, kept)
        links = settle_links(job, self.groups, self.device, self.run_folder.path / "hierarchy.json")
        return Engine(
            definition,
            self.groups,
            layers,
            sample,
            job.num_micro_batches,
            job.optimizer,
            seed=job.train.seed,
            dtype=self.dtype,
            device=self.device,
            recorder=self.recorder,
            overlap=job.overlap,
            comm=links,
        )

    def _build_meter(self) -> StepMeter:
        job = self.job
        self.peak: Peak = find_peak(self.device, self.dtype)
        tokens = job.train.global_batch * job.model.sequence
        flops = job.model.flops_per_token() * tokens
        return StepMeter(tokens, flops, self.peak.flops_per_second * self.place.world, self.device)

    def _resume(self) -> int:
        """Loads the newest checkpoint that verifies, else the weights to begin with, if there are any; gives
        the number of steps done."""
        found = [self.checkpoints.newest() if self.is_first else None]
        if self.place.world > 1:
            dist.broadcast_object_list(found, src=0)
        step, problems = found[0] or (0, [])
        if step == 0:
            if begun := fill_initial(self.run_folder, self.job, self.engine):
                self._event("weights", **begun)
        else:
            progress = load(self.checkpoints.of_step(step), list(self.engine.all_rectangles()))
            self.engine.optimizer.steps_done = progress["optimizer_steps"]
            self.engine.loaded()
        aside = [path.name for path in self.checkpoints.set_aside_after(step)] if self.is_first else []
        for problem in problems:
            self._event("fault", step=step, problem=problem, set_aside=aside)
        return step

    def train(self) -> None:
        """Runs to the last step, or to the step in which somebody asked to stop."""
        self._announce()
        try:
            with lost_peers_told(self.job.comm.timeout_seconds):
                self._run_steps()
        except MyriadError as error:
            step = self.step + 1
            self._event("fault", step=step, problem=str(error).removeprefix(f"step {step}: "))
            raise

    def _run_steps(self) -> None:
        steps = self.job.train.steps
        while self.step < steps:
            try:
                stopping = self._train_step()
            except MyriadError:  # on every rank: what was being saved is good
                self._tell_saved(self.saver.finish())
                raise
            self._after_step(is_last=self.step == steps, stopping=stopping)
            self.garbage.after_step(self.step)
            if stopping and self.step < steps:
                self._event("interrupted", step=self.step)
                return
        self._finish()

    def close(self) -> None:
        """Leaves the loader and the world."""
        self.garbage.close()
        self.engine.close()
        self.feed.close()
        close_world()

    def _announce(self) -> None:
        job = self.job
        resumed = {"resumed_from": self.step} if self.step else {}
        self._event(
            "start",
            world=self.place.world,
            device=str(self.device.type),
            precision=str(self.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            parameters=job.model.num_parameters(),
            flops_per_token=job.model.flops_per_token(),
            peak_flops=self.meter.peak_flops,
            peak_source=self.peak.source,
            **resumed,
        )
        if self.step:
            self._event("resume", step=self.step)

    def _train_step(self) -> bool:
        """One step; True when all ranks must stop after it (replicas that train alone: where they agree)."""
        started, waited = time.perf_counter(), self.feed.wait_seconds
        rate = learning_rate(self.job.optimizer, self.step, self.job.train.steps)
        result: StepResult = self.engine.train_step(
            self._load, rate, self.meter.tokens_per_step, signal=float(self.stop.asked)
        )
        self.step += 1
        seconds = time.perf_counter() - started
        if self.is_first:
            waited = self.feed.wait_seconds - waited
            self.run_folder.append_metrics(
                self.meter.line(self.step, result, rate, seconds, waited, self.recorder)
            )
        return result.signal > 0 and self.step % self.job.comm.sync_every == 0

    def _load(self) -> Batch:
        job, grid = self.job, self.groups.grid
        rows = rank_rows(job, grid.index("dp"))
        own = self.feed.rows(self.step, rows.start, rows.stop)
        return to_batch(job, own, self.step * job.train.global_batch + rows.start, self.device)

    def _after_step(self, *, is_last: bool, stopping: bool) -> None:
        train, every = self.job.train, self.job.checkpoint.every
        if is_last or (train.validate_every and self.step % train.validate_every == 0):
            self._validate()
        if is_last or stopping or (every and self.step % every == 0):
            self._save()
        self._tell_saved(self.saver.finish() if is_last or stopping else self.saver.take_saved())

    def _validate(self) -> None:
        if self.validation.num_batches == 0:
            return
        indices = range(self.validation.num_batches)
        total = sum(self.engine.evaluate(partial(self.validation.batch, index)) for index in indices)
        loss = total / self.validation.num_targets
        if self.is_first:
            self._event(
                "validation", step=self.step, loss=loss, bits_per_byte=self.validation.bits_per_byte(loss)
            )

    def _save(self) -> None:
        progress: dict[str, Any] = {"step": self.step, "optimizer_steps": self.engine.optimizer.steps_done}
        self.saver.start(self.step, list(self.engine.rectangles()), progress)

    def _tell_saved(self, saved: Iterable[Saved]) -> None:
        for one in saved:
            self._event("checkpoint", step=one.step, path=one.name, seconds=one.seconds)

    def _finish(self) -> None:
        if self.is_first and self.job.train.sample_prompt is not None:
            text = continue_text(self.run_folder, self.job.train.sample_prompt)
            self._event("sample", prompt=self.job.train.sample_prompt, text=text)
        self._event("finish", step=self.step)

    def _event(self, event: str, **fields: Any) -> None:
        if self.is_first:
            self.run_folder.append_event(event, **fields)
