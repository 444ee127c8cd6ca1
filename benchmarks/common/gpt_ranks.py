"""Myriad's engine on the hosts of `hosts.py`: a job's iterations, with every rank's spans.

    with Hosts(2, rate="200mbit") as hosts:
        ranks = train(hosts, make_job({"layout.pp": 2, "overlap.pipeline": False}), steps=4)
        ranks[0].step_seconds, ranks[0].losses, ranks[1].spans

Iterations follow each other without a barrier, as in training, so that what one leaves under way has to be
done in the next; a step lasts from its start to the next one's. The first step is not counted.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from hosts import Hosts
from myriad.comm.groups import close_world, open_world
from myriad.data.corpus import read_batch
from myriad.data.corpus_opening import open_corpora
from myriad.data.loader import LoaderClient, LoaderSpec
from myriad.job import Job, load_job
from myriad.model.gpt import GPT
from myriad.optim.schedule import learning_rate
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder, Span
from myriad.train.data_loader import rank_rows, to_batch
from myriad.train.engine_setup import stage_layers
from myriad.train.metrics import find_peak

__all__ = ["RankRun", "Setup", "make_job", "peak_flops", "train"]

CPU, FLOAT32 = torch.device("cpu"), torch.float32
Load = Callable[[int], Batch]
"""From the number of a step to this rank's share of its batch."""


@dataclass(frozen=True)
class Setup:
    """What a job does not say."""

    loader_ahead: bool = False
    """The node's loader process reads the next steps; off: each step reads its own text."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered on every rank for as long as it trains."""


@dataclass(frozen=True)
class RankRun:
    """What one rank saw."""

    begun: list[float]
    """When each counted step began, and when the last one ended, in seconds since the epoch."""
    losses: list[float]
    """Loss of every step, the first one included."""
    spans: list[Span]
    """Spans of every step."""

    @property
    def step_seconds(self) -> list[float]:
        """Return the seconds of each counted step."""
        return [stop - start for start, stop in zip(self.begun, self.begun[1:], strict=False)]


_SETUP = Setup()


def make_job(overrides: Mapping[str, object]) -> Job:
    """The job `tiny` with other values; ``None`` is off."""
    words = {key: "off" if value is None else value for key, value in overrides.items()}
    return load_job("tiny", [f"{key}={_toml(value)}" for key, value in words.items()])


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def train(
    hosts: Hosts, job: Job, steps: int, setup: Setup = _SETUP, *, ranks_per_host: int = 1
) -> list[RankRun]:
    """``steps`` counted iterations of a job; ranks fill one host after the other."""
    world = job.layout.world
    return hosts.run_ranks(_train_rank, job, steps, setup, world=world, ranks_per_host=ranks_per_host)


def peak_flops(hosts: Hosts) -> float:
    """FLOP/s of a float32 matrix product on all cores at once, one thread each."""
    cores = min(len(hosts.cores), hosts.num_hosts)
    return float(sum(hosts.run_ranks(_peak, world=cores)))


def _peak() -> float:
    return find_peak(CPU, FLOAT32, measure_seconds=1.0).flops_per_second


def _train_rank(job: Job, steps: int, setup: Setup) -> RankRun:
    with setup.around():
        recorder = Recorder(ring=SpanRing.of_its_own(2**16))
        engine = _build_engine(job, recorder)
        load, close = _open_data(job, engine, ahead=setup.loader_ahead)
        run = _run_steps(job, engine, load, steps, recorder)
        engine.close()
        close()
        close_world()
    return run


def _build_engine(job: Job, recorder: Recorder) -> Engine:
    groups = open_world(job.layout, CPU)
    definition = GPT(job.model, job.train.seed)
    tokens = torch.zeros(job.layout.micro_batch, job.model.sequence, dtype=torch.int64)
    sample = Batch(tokens, tokens, tokens[:, 0])
    return Engine(
        definition,
        groups,
        stage_layers(definition, job.layout, groups, sample, FLOAT32),
        sample,
        job.num_micro_batches,
        job.optimizer,
        seed=job.train.seed,
        dtype=FLOAT32,
        device=CPU,
        recorder=recorder,
        overlap=job.overlap,
        comm=job.comm,
    )


def _open_data(job: Job, engine: Engine, *, ahead: bool) -> tuple[Load, Callable[[], None]]:
    rows = rank_rows(job, engine.groups.grid.index("dp"))
    if ahead:
        spec = LoaderSpec(
            name=f"{os.getpid()}:{os.environ['MASTER_PORT']}",
            data=job.data,
            sequence=job.model.sequence,
            global_batch=job.train.global_batch,
            seed=job.train.seed,
            rows=((rows.start, rows.stop),),
        )
        client = LoaderClient(spec)
        return lambda step: _batch(job, client.get(step), step, rows), client.close
    corpora = open_corpora(job.data, job.model.sequence)
    sampler = corpora.sampler(job.train.seed)

    def load(step: int) -> Batch:
        first = step * job.train.global_batch
        tokens = read_batch(corpora, sampler, range(first + rows.start, first + rows.stop))
        return _batch(job, tokens, step, rows)

    return load, lambda: None


def _batch(job: Job, tokens: object, step: int, rows: range) -> Batch:
    return to_batch(job, tokens, step * job.train.global_batch, rows.start, CPU)  # type: ignore[arg-type]


def _run_steps(job: Job, engine: Engine, load: Load, steps: int, recorder: Recorder) -> RankRun:
    begun, losses = [], []
    targets = job.train.global_batch * job.model.sequence
    for step in range(steps + 1):
        begun.append(time.time())
        rate = learning_rate(job.optimizer, step, steps + 1)
        losses.append(engine.train_step(partial(load, step), rate, targets).loss)
    begun.append(time.time())
    return RankRun(begun[1:], losses, recorder.newest())
