"""What a rank has before there is a model: its inputs, its device, its numbers, its peers and its recorder.

A job is refused here, on every rank alike, before memory is allocated or a message is sent:

    inputs      corpora and tokenizer are those of the run
    device      a GPU for each rank, or the CPU; deterministic if asked
    numbers     precision, recompute within the memory budget, kernels that were proved on this device
    peers       the process groups of the layout
    recorder    spans and counters, which the node agent reads
"""

import atexit
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from myriad.comm.attempt_layout import AS_THE_JOB, ATTEMPT_LAYOUT, AttemptLayout
from myriad.comm.clock_comparison import compare_clocks
from myriad.comm.groups import Groups, close_world, open_world
from myriad.data.tokenizer import Tokenizer
from myriad.job import Job
from myriad.kernels.agreement import library_doubts, proved
from myriad.kernels.config import Kernels
from myriad.optim.config import float8_scaling
from myriad.optim.precision import resolve_precision
from myriad.run import Run
from myriad.system.spin_control import control_spinning
from myriad.telemetry.progress.device_clock import cuda_clock
from myriad.telemetry.progress.device_progress import DeviceProgress
from myriad.telemetry.progress.progress_page import ProgressRow, own_row
from myriad.telemetry.shipping.clock_offset import ClockOffset
from myriad.telemetry.shipping.shipper import Shipper, open_outlets
from myriad.telemetry.span_io.span_ring import SPANS, SpanRing, SpanRings, own_ring, ring_at
from myriad.telemetry.spans import Recorder
from myriad.train.device_setup import (
    RankEnvironment,
    agree_on_kernels,
    choose_kernels,
    fix_order,
    pick_device,
    prepare_cuda,
    read_rank_environment,
    within_budget,
)
from myriad.train.inputs import (
    check_streams,
    keep_inputs,
    open_inputs,
    refuse_other_tokenizer,
    refuse_replaced_corpus,
)
from myriad.train.step_signals import StopSignal

__all__ = ["RankContext", "agree_on_numbers", "open_device", "open_rank"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """One rank of one attempt of a run."""

    run: Run
    job: Job
    """The job of this attempt, with recompute chosen."""
    place: RankEnvironment
    attempt: int
    """The driver's number of this attempt; 0 if there is no driver."""
    in_process: bool
    """Whether the rank is the calling process, which goes on after it."""
    stop: StopSignal
    progress: ProgressRow
    contents: list[str]
    """`myriad.data.corpus.Corpora.content` of the corpora that the rank opened, for each phase; empty without
    corpora."""
    tokenizer: Tokenizer | None
    """The tokenizer of the corpora, if they have one; without corpora, the run's."""
    device: torch.device
    dtype: torch.dtype
    """Type of parameters and activations."""
    groups: Groups
    kernels: Kernels
    recorder: Recorder

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run's files."""
        return self.place.rank == 0


def open_rank(
    run: Run, at_close: contextlib.ExitStack, *, in_process: bool, reads_corpora: bool = True
) -> RankContext:
    """Check the job against this machine and join the other ranks. All ranks call it together.

    Without ``reads_corpora``, only the run's tokenizer is read. ``at_close`` gets what must be undone when
    the rank ends. Raises `myriad.errors.BadInputError`.
    """
    job = _attempt_job(run.job())
    place = read_rank_environment(job.layout.world, job.comm)
    stop = StopSignal()
    if in_process:
        at_close.callback(stop.restore)
    progress = own_row()
    attempt = int(os.environ.get("MYRIAD_EPOCH", "0"))
    contents: list[str] = []
    tokenizer: Tokenizer | None
    if reads_corpora:
        contents, tokenizer = _open_inputs(run, job, place, compared=bool(attempt or in_process))
    else:
        tokenizer = Tokenizer.load(run.path)
    device = open_device(job, place, at_close, in_process=in_process)
    dtype = resolve_precision(job.train.precision, device, skips_steps=not job.overlap.updates_early)
    job, groups, kernels = agree_on_numbers(job, device, dtype, at_close)
    at_end = at_close.callback if in_process else atexit.register  # also after an error
    ring = _open_ring(run, job, place, groups, at_end)
    recorder = Recorder(progress, ring, place.rank, cuda_clock() if device.type == "cuda" else None)
    recorder.records_details = job.telemetry.spans
    recorder.serve()
    if recorder.device is not None:  # on a CPU the host reports progress itself
        watch = DeviceProgress(recorder.device, progress, partial(torch.cuda.set_device, device))
        at_close.callback(watch.close)
    return RankContext(
        run,
        job,
        place,
        attempt,
        in_process,
        stop,
        progress,
        contents,
        tokenizer,
        device,
        dtype,
        groups,
        kernels,
        recorder,
    )


def _attempt_job(job: Job) -> Job:
    """Apply the layout that the driver set for this attempt. Raises `BadInputError` for one that cannot be
    computed."""
    layout = AttemptLayout.parse(os.environ.get(ATTEMPT_LAYOUT, ""))
    return job if layout == AS_THE_JOB else job.in_attempt(layout)


def _open_inputs(
    run: Run, job: Job, place: RankEnvironment, *, compared: bool
) -> tuple[list[str], Tokenizer | None]:
    """Check the inputs that the job reads, and return `Corpora.content` of each phase and the tokenizer.

    ``compared``: `myriad train` has already compared the tokenizer with the run's. If another launcher
    (torchrun) started the ranks, the ranks compare it here.
    """
    inputs = open_inputs(job, _LOG.info, run)
    if compared:
        if place.local_rank == 0:
            refuse_replaced_corpus(run, job, inputs.content)
        return inputs.contents, inputs.first.tokenizer
    refuse_other_tokenizer(run, job, inputs)
    if place.rank == 0:
        check_streams(run, job, inputs)
        for change in keep_inputs(run, job, inputs):
            _LOG.warning("changed: %s", change)
    return inputs.contents, inputs.first.tokenizer


def open_device(
    job: Job, place: RankEnvironment, at_close: contextlib.ExitStack, *, in_process: bool
) -> torch.device:
    """Return this rank's device, and prepare the process for it. ``in_process``: the process goes on after
    the rank."""
    prepare_cuda(job.layout, job.overlap, deterministic=job.train.deterministic)
    device = pick_device(job.train.device, job.train.threads, place)
    if job.train.deterministic:
        fix_order(device)
        if in_process:
            at_close.callback(torch.use_deterministic_algorithms, False)
    if device.type == "cpu" and (spins := control_spinning(torch.get_num_threads())) is not None:
        at_close.callback(spins.close)
    return device


def agree_on_numbers(
    job: Job, device: torch.device, dtype: torch.dtype, at_close: contextlib.ExitStack
) -> tuple[Job, Groups, Kernels]:
    """Choose recompute and kernels, open the process groups, and warn about fallbacks."""
    on_cpu = device.type == "cpu"
    job, about_budget = within_budget(job, on_cpu=on_cpu, value_bytes=dtype.itemsize)
    lines = [about_budget, *choose_kernels(job, device, dtype)]
    scaling = float8_scaling(job.train.precision)
    kernels, doubt = proved(job.train.kernels, device, dtype, float8=scaling is not None)
    lines += library_doubts(device, dtype, float8=scaling)
    groups = open_world(job.layout, device, comm=job.comm)
    at_close.callback(close_world)
    if not on_cpu:  # kernels are proved on GPUs only
        kernels, doubt = agree_on_kernels(kernels, doubt, groups, device)
    for line in filter(None, [*lines, doubt]):
        _LOG.warning(line)
    return job, groups, kernels


def _open_ring(
    run: Run, job: Job, place: RankEnvironment, groups: Groups, at_end: Callable[[Callable[[], None]], object]
) -> SpanRing:
    """Return this rank's ring of spans, and make sure that a process or a thread empties it.

    The node agent does so. A rank without one (torchrun or Slurm started it) ships its own spans: the thread
    is the agent's, with one ring, and files are named by rank. ``at_end`` registers the end of such a thread.
    All ranks call it together.
    """
    if SPANS in os.environ or not job.telemetry.spans:
        return own_ring()
    clock = _clock_offset(place, groups)
    rings = SpanRings(1)
    node = int(os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or 0)

    def report(where: str, problem: str, num_dropped: int) -> None:
        status = problem or "works again"
        _LOG.warning("spans to %s: %s; %d spans are lost", where, status, num_dropped)
        fields = {"node": node, "rank": place.rank, "place": where, "problem": problem}
        run.append_event("telemetry", **fields, num_dropped=num_dropped)

    outlets = open_outlets(run.spans_path, f"rank-{place.rank}", run.path.name, job.telemetry, report)
    shipper = Shipper(rings, node, outlets, clock.at)
    shipper.begin(1)
    at_end(shipper.close)
    return ring_at(rings.address(0), attempt=run.num_starts() + 1)


def _clock_offset(place: RankEnvironment, groups: Groups) -> ClockOffset:
    """Return this rank's clock offset from the first rank's clock."""
    clock = ClockOffset()
    together = groups.on_host("checkpoints") if place.world > place.local_world else None
    if together is None:
        clock.same()
        return clock
    return compare_clocks(together)
