"""Seconds that a start spends on initial values, fresh and from a checkpoint, on this machine.

    python benchmarks/training/initial_values.py [JOB] [--KEY VALUE ...]

One rank builds its engine twice, as a start from a checkpoint does (without values) and as a fresh one does,
and draws are timed alone. Below stands what the rate means for a rank of Llama 3 8B (data parallelism 8):
a rank draws the tensors of which its slices hold a part, with ZeRO 0 all.
"""

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from digests import make_engine
from myriad.comm.groups import close_world
from myriad.job import load_job
from myriad.model import gpt
from myriad.train.device_setup import pick_device, read_rank_environment


def _spent(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """What a call gives, its seconds, and the values that were drawn in it."""
    with mock.patch.object(gpt, "seeded_normal", wraps=gpt.seeded_normal) as draw:
        began = time.perf_counter()
        made = work()
        seconds = time.perf_counter() - began
    return made, seconds, sum(torch.Size(call.args[1]).numel() for call in draw.call_args_list)


def main(job_name: str, overrides: list[str]) -> None:
    """Print the table."""
    job = load_job(job_name, ["layout.dp=1", *overrides])
    device = pick_device(job.train.device, job.train.threads, read_rank_environment(1, job.comm))
    (engine, _), built, unneeded = _spent(lambda: make_engine(job, device, draws_initial=False))
    _, spent, drawn = _spent(engine.draw_initial)
    close_world()
    print(f"{job_name}: {job.model.num_parameters():,} parameters")
    print(f"engine, as a start from a checkpoint makes it   {built:6.2f} s, {unneeded:,} drawn")
    rate = drawn / spent
    print(f"and what a fresh start adds: values             {spent:6.2f} s, {drawn:,} drawn, {rate:,.0f}/s")
    count = load_job("llama3-8b", []).model.num_parameters()
    shares = {"fresh, ZeRO 0": 1.0, "fresh, ZeRO 1 to 3, dp 8": 1 / 8, "from a checkpoint": unneeded / drawn}
    for start, share in shares.items():
        print(f"a rank of Llama 3 8B, {start:26s}{count * share / rate:6.1f} s")


if __name__ == "__main__":
    words = sys.argv[1:]
    name = words.pop(0) if words and not words[0].startswith("--") else "gpt2-124m"
    keys, values = words[::2], words[1::2]
    main(name, [f"{key.removeprefix('--')}={value}" for key, value in zip(keys, values, strict=True)])
