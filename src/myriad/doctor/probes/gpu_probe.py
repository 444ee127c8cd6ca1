"""Each GPU: matrix product, memory patterns, copies from each memory node, Triton's kernels against the
formulas, and the mini-model bit for bit.

The probe runs in a process of its own: a faulty device can hang its caller.
"""

import os
import time
from collections.abc import Callable, Iterator

import torch

from myriad.doctor.diagnosis import Reading
from myriad.doctor.probes.memory_probe import PATTERNS
from myriad.doctor.probes.operator_probe import check_operators, try_operators
from myriad.doctor.probes.rank_probe import find_outliers, train_bits
from myriad.optim.precision import resolve_precision
from myriad.system.machine import find_memory_nodes

__all__ = ["check_gpus"]

_PRODUCT, _COPY_BYTES, _MOST_PATTERN_BYTES = 4096, 2**28, 2**32
_SECONDS = 0.2
_FLOOR_FLOPS, _FLOOR_MEMORY, _FLOOR_COPY = 1e13, 1e11, 2e9


def check_gpus() -> Iterator[Reading]:
    """Yield the readings of all GPUs; one skipped item if there is none."""
    if not torch.cuda.is_available():
        yield Reading(name="GPU", skipped="no GPU that torch can use")
        yield from check_operators("cpu")
        return
    yield from check_operators("cuda")
    bits = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield from _rates(device)
        yield _patterns(device)
        yield from try_operators(device)
        bits[f"GPU {index}"] = found = train_bits(device)
        yield Reading(
            name=f"GPU {index} mini-model, bit for bit",
            value=found,
            hardware=_key(device),
            measure=f"mini-model, torch {torch.__version__}",
            remedy="other bits than in the baseline: run it again, then take the GPU out",
        )
    if odd := find_outliers(bits):
        problem = f"{', '.join(odd)} computed other bits than most: take the node out"
        yield Reading(name="GPUs agree", problem=problem)


def _key(device: torch.device) -> str:
    return f"gpu {torch.cuda.get_device_name(device)}"


def _rates(device: torch.device) -> Iterator[Reading]:
    key, name = _key(device), f"GPU {device.index}"
    dtype = resolve_precision("auto", device, skips_steps=True)  # a V100 multiplies no bfloat16
    a = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype, device=device)
    flops = 2 * _PRODUCT**3 / _seconds(device, lambda: a @ a)
    slow = "look at its temperature, power limit and clocks (nvidia-smi -q)"
    yield _rate(f"{name} matrix product", flops, "FLOP/s", _FLOOR_FLOPS, key, slow)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    copied = 2 * _COPY_BYTES / _seconds(device, lambda: there.copy_(here))
    yield _rate(f"{name} memory bandwidth", copied, "bytes/s", _FLOOR_MEMORY, key, slow)
    for node in find_memory_nodes():
        os.sched_setaffinity(0, node.cpus)  # memory touched first from here is the node's
        host = torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory()
        rate = _COPY_BYTES / _seconds(device, lambda host=host: here.copy_(host, non_blocking=True))  # type: ignore[misc]
        reseat = "it came up with fewer PCIe lanes or an older rate: compare nvidia-smi -q -d PCIE; reseat it"
        yield _rate(f"memory node {node.index} to {name}", rate, "bytes/s", _FLOOR_COPY, key, reseat)


def _rate(name: str, value: float, unit: str, floor: float, key: str, remedy: str) -> Reading:
    return Reading(
        name=name,
        value=value,
        unit=unit,
        floor=floor,
        hardware=key,
        remedy=remedy,
    )


def _seconds(device: torch.device, function: Callable[[], object]) -> float:
    """Return the seconds of one call, averaged over some tenths of a second."""
    function()
    torch.cuda.synchronize(device)
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _SECONDS:
        for _ in range(4):
            function()
        torch.cuda.synchronize(device)
        calls += 4
    return passed / max(calls, 1)


def _patterns(device: torch.device) -> Reading:
    free, _ = torch.cuda.mem_get_info(device)
    words = torch.empty(max(1, min(free // 4, _MOST_PATTERN_BYTES) // 8), dtype=torch.int64, device=device)
    wrong = 0
    for pattern in PATTERNS:
        if pattern is None:
            right = torch.arange(len(words), device=device)
            wrong += int((words.copy_(right) != right).sum())
        else:
            signed = pattern - 2**64 if pattern >= 2**63 else pattern
            wrong += int((words.fill_(signed) != signed).sum())
    problem = f"{wrong} words came back different: take the GPU out" if wrong else ""
    note = f"{len(PATTERNS)} patterns over {8 * len(words) / 2**20:.0f} MiB"
    name = f"GPU {device.index} memory patterns"
    return Reading(name=name, value=float(wrong), unit="wrong words", problem=problem, note=note)
