"""What telling digests of replicas costs a step of a job, on this machine.

    python benchmarks/training/digests.py [JOB] [--layout.dp 2 ...] [--steps 40]

The job's own ranks train, each step with a digest, for real; what is timed is the digest alone (and the sums
of gradients that name who made a NaN), beside the median step. The last column is what it costs with
`resilience.verify_every` as the job has it. "By the device's way": the reduction that a GPU does, done here.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from myriad.comm.groups import close_world, open_world
from myriad.job import Job, load_job
from myriad.model.gpt import GPT
from myriad.optim.precision import resolve_precision
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.own_gradients import OwnGradients
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder
from myriad.train.device_setup import pick_device, read_rank_environment
from myriad.train.replica_digests import digest_of, reduce_bits

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from ranks import run_ranks


def make_engine(
    job: Job, device: torch.device, recorder: Recorder | None = None, *, draws_initial: bool = True
) -> tuple[Engine, Batch]:
    """As a trainer has it, without a corpus: the bits do not matter."""
    layout, model = job.layout, job.model
    dtype = resolve_precision(job.train.precision, device)
    groups = open_world(layout, device, comm=job.comm)
    definition = GPT(model, job.train.seed)
    costs = [1.0] * len(definition.kinds)
    rows = job.train.global_batch // layout.dp
    tokens = torch.zeros(rows, model.sequence, dtype=torch.int64, device=device)
    sample = Batch(
        tokens[: layout.micro_batch], tokens[: layout.micro_batch], tokens[: layout.micro_batch, 0]
    )
    engine = Engine(
        definition,
        groups,
        partition_layers(layout.partition, layout.num_stages, definition.kinds, costs),
        sample,
        job.num_micro_batches,
        job.optimizer,
        seed=job.train.seed,
        dtype=dtype,
        device=device,
        recorder=recorder or Recorder(),
        overlap=job.overlap,
        comm=job.comm,
        draws_initial=draws_initial,
    )
    return engine, Batch(tokens, tokens, tokens[:, 0])


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, until the device has done it."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(job: Job, steps: int) -> dict[str, float]:
    """One rank's medians."""
    device = pick_device(job.train.device, 1, read_rank_environment(job.layout.world, job.comm))
    engine, batch = make_engine(job, device)
    digests, spent = list[float](), list[float]()
    engine.before_update = lambda: digests.append(
        seconds_of(lambda: int(digest_of(held)) if (held := engine.replicated()) else None, device)
    )
    add = OwnGradients._add
    OwnGradients._add = lambda self, spans: spent.append(  # type: ignore[method-assign]
        seconds_of(lambda: add(self, spans), device)
    )
    taken, sums = list[float](), list[float]()
    targets = job.train.global_batch * job.model.sequence
    for _ in range(steps):
        spent.clear()
        taken.append(seconds_of(lambda: engine.train_step(lambda: batch, 1e-4, targets), device))
        sums.append(sum(spent))
    held = engine.replicated()
    num_bytes = sum(one.numel() * one.element_size() for one in held)
    reduced = [seconds_of(lambda: reduce_bits(held), device) for _ in range(9 if held else 0)] or [0.0]
    engine.close()
    close_world()
    found = {"step": taken, "digest": digests, "sums": sums}
    return {name: statistics.median(each) for name, each in found.items()} | {
        "bytes": float(num_bytes),
        "reduced": statistics.median(reduced),
    }


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What telling digests of replicas costs a step of a job.")
    parser.add_argument("job", nargs="?", default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    options, rest = parser.parse_known_args(arguments)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    job = load_job(options.job, [f"{key.removeprefix('--')}={value}" for key, value in pairs])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    of_rank = run_ranks(job.layout.world, measure, job, options.steps)
    worst = max(of_rank, key=lambda each: each["digest"])
    every = job.resilience.verify_every
    step = worst["step"] - worst["digest"]
    layout = " ".join(f"{axis}={getattr(job.layout, axis)}" for axis in ("dp", "pp", "tp", "zero"))
    print(f"{job.name}: {layout}, {worst['bytes'] / 2**20:.1f} MiB of a rank are compared")
    print(
        "| step | a digest | by the device's way | sums of gradients | all, every step | with verify_every |"
    )
    print("|---|---|---|---|---|---|")
    share = (worst["digest"] / every if every else 0.0) / step
    print(
        f"| {1e3 * step:.1f} ms | {1e3 * worst['digest']:.3f} ms | {1e3 * worst['reduced']:.3f} ms"
        f" | {1e3 * worst['sums']:.3f} ms, {worst['sums'] / step:.3%}"
        f" | {worst['digest'] / step:.3%} | every {every}: {share:.4%} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
