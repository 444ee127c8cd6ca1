"""Seconds that a start spends on initial values, fresh and from a checkpoint, on this machine.

    python benchmarks/initial_values.py [JOB] [--KEY VALUE ...]

One rank builds its engine twice, as a start from a checkpoint does (without values) and as a fresh one does,
and draws are timed alone. Below stands what the rate means for a rank of Llama 3 8B (data parallelism 8):
a rank draws the tensors of which its slices hold a part, with ZeRO 0 all.
"""

import sys
import time
from unittest import mock

import torch

from digests import make_engine
from myriad.comm.groups import close_world
from myriad.job import load_job
from myriad.model import gpt
from myriad.parallel.engine import Engine
from myriad.train.build import find_place, pick_device


def main(job_name: str, overrides: list[str]) -> None:
    """Print the table."""
    job = load_job(job_name, ["layout.dp=1", *overrides])
    device = pick_device(job.train.device, job.train.threads, find_place(1, job.comm))
    with mock.patch.object(Engine, "draw_initial"):
        began = time.perf_counter()
        engine, _ = make_engine(job, device)
        bare = time.perf_counter() - began
    with mock.patch.object(gpt, "seeded_normal", wraps=gpt.seeded_normal) as draw:
        began = time.perf_counter()
        engine.draw_initial()
        spent = time.perf_counter() - began
    drawn = sum(torch.Size(call.args[1]).numel() for call in draw.call_args_list)
    close_world()
    print(f"{job_name}: {job.model.num_parameters():,} parameters, {torch.get_num_threads()} threads")
    print(f"engine without values     {bare:8.2f} s")
    print(f"initial values, fresh     {spent:8.2f} s   {drawn / spent / 1e6:,.0f} M values/s")
    print("initial values, resumed       0.00 s   none is drawn")
    count = load_job("llama3-8b", []).model.num_parameters()
    for name, share in (
        ("fresh, ZeRO 0", 1.0),
        ("fresh, ZeRO 1 to 3, dp 8", 1 / 8),
        ("from a checkpoint", 0),
    ):
        print(f"8B, {name:26s}{count * share * spent / drawn:8.1f} s")


if __name__ == "__main__":
    words = sys.argv[1:]
    name = words.pop(0) if words and not words[0].startswith("--") else "gpt2-124m"
    keys, values = words[::2], words[1::2]
    main(name, [f"{key.removeprefix('--')}={value}" for key, value in zip(keys, values, strict=True)])
