"""veGiantModel's contenders on real processes, over links of the article's ratio of communication to compute.

A step of the article's GPT-13B has so many seconds of bytes on a machine's NICs and so many of compute: their
ratio is what decides how much a network can cost. Here each contender trains a small GPT on two hosts
(`hosts.py`), and the link gets the rate at which the bytes that *this* contender sends take the same ratio of
the compute here. A fifth of the bandwidth there is a fifth of it here.

    ZeRO-3      the installed DeepSpeed on gloo, dp 2; its bucket sizes are those of DeepSpeedExamples, scaled
                as a matrix here is to one of GPT-13B, so that a bucket holds as many matrices
    Megatron    `peers/megatron_layout.py`: tp 2 inside hosts, pp 2 between them, 1F1B, every message waited
                for
    Myriad      the same layout as Megatron's, zero-bubble, all overlaps on

DeepSpeed v0.4.2 needs CUDA and is not what runs; later releases prefetch deeper and do not wait for the
device.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts
from peers.deepspeed_peer import DeepSpeed, missing
from peers.megatron_layout import MegatronLayout
from peers.myriad_side import Myriad, alone
from peers.work import Timing, Work, run_contender

__all__ = ["CONTENDERS", "HERE", "Visit", "measure", "scaled_keys"]

HERE = Work(layers=7, hidden=256, heads=4, vocabulary=3072, sequence=256, global_batch=8)
_HIDDEN_THERE = 5120
_TIMED = 3
_LONG_SECONDS = 4.0
"""Steps that are expected to take longer are timed once."""


def scaled_keys(hidden: int) -> dict[str, int | bool]:
    """DeepSpeedExamples' ds_zero_stage_3_config.json for matrices of another width."""
    ratio = (hidden / _HIDDEN_THERE) ** 2
    return {
        "stage3_prefetch_bucket_size": round(1e7 * ratio),
        "stage3_max_live_parameters": round(1e9 * ratio),
        "stage3_max_reuse_distance": round(1e9 * ratio),
        "stage3_param_persistence_threshold": round(1e5 * ratio),
        "reduce_bucket_size": round(1e7 * ratio),
    }


_PIPELINE: dict[str, Any] = {"tp": 2, "pp": 2, "micro_batch": 1}
CONTENDERS = {
    "ZeRO-3": (1, partial(DeepSpeed, zero=3, keys=scaled_keys(HERE.hidden))),
    "Megatron": (2, partial(MegatronLayout, tp=2, micro_batch=1)),
    "Myriad": (2, partial(Myriad, layout={**_PIPELINE, "schedule": "zero-bubble"})),
}
"""Ranks of a host, and what they are."""


@dataclass(frozen=True)
class Visit:
    """One contender at one rate."""

    contender: str
    environment: str
    ratio: float
    """Seconds of bytes for one of compute, there and here."""
    bits_per_second: float
    seconds: float
    """Seconds of the fastest step of all visits, which other work on the machine disturbs least."""
    unshaped_seconds: float
    compute_seconds: float
    """Seconds of a step's compute alone, with all ranks running at once."""
    sent_bytes: float
    """Bytes that a host sends in a step."""


def measure(system: str, ratios: Sequence[tuple[str, float]], rounds: int) -> list[Visit]:
    """Visit the links at each environment's ratio, in turns, so that a disturbance does not fall
    on one of them. Raises `host_ranks.RankError` where ranks fail."""
    problem = missing()
    if problem is not None and system.startswith("ZeRO"):
        raise SystemExit(f"DeepSpeed is needed: {problem}")
    ranks, make = CONTENDERS[system.split()[0]]
    quickest: dict[str, float] = {}
    unshaped = sent = 0.0
    with Hosts(2) as hosts:
        compute = min(_compute_seconds(hosts, ranks) for _ in range(2))
        for turn in range(rounds):
            hosts.set_rate(None)
            free = _train(hosts, make, ranks, _TIMED)
            unshaped = min([*free[0].seconds, unshaped or math.inf])
            sent = sent or max(one.sent_bytes for one in free)
            print(f"{system}: compute {compute:.2f} s, unshaped {unshaped:.2f} s, {sent / 1e6:.1f} MB a host")
            for environment, ratio in ratios:
                if turn and quickest[environment] > _LONG_SECONDS:
                    continue
                hosts.set_rate(f"{sent * 8 / (ratio * compute) / 1e3:.0f}kbit")
                timings = _train(hosts, make, ranks, _num_steps(compute * (1 + ratio)))
                seconds = min([*timings[0].seconds, quickest.get(environment, math.inf)])
                quickest[environment] = seconds
                print(f"  {environment}: ratio {ratio:.3f}, {seconds:.2f} s", flush=True)
    return [
        Visit(system, at, ratio, sent * 8 / (ratio * compute), quickest[at], unshaped, compute, sent)
        for at, ratio in ratios
    ]


def _num_steps(expected_seconds: float) -> int:
    return 1 if expected_seconds > _LONG_SECONDS else _TIMED


def _train(hosts: Hosts, make: Any, ranks: int, num_steps: int) -> list[Timing]:
    return hosts.run_ranks(run_contender, make, HERE, num_steps, ranks_per_host=ranks)


def _compute_seconds(hosts: Hosts, ranks: int) -> float:
    """Every rank's share of the batch alone, all at once: the slowest rank's quickest step."""
    world = 2 * ranks
    share = Work(**(vars(HERE) | {"global_batch": HERE.global_batch // world}))
    make = partial(alone, micro_batch=min(2, share.global_batch))
    timings = hosts.run_ranks(run_contender, make, share, _TIMED, ranks_per_host=ranks)
    return max(min(timing.seconds) for timing in timings)
