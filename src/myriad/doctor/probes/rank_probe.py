"""The node's cores as ranks: a matrix product and the mini-model on each, and all-to-all among them.

Real processes over gloo, one pinned to each core (at most `_MOST_RANKS`, spread over the node), forked from
a process that has imported torch. The probe runs in a process of its own.

The mini-model is a small training run whose losses and final weights are hashed: all cores must give the same
bits.
"""

import hashlib
import json
import os
import select
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from myriad.comm.collectives import start_all_to_all
from myriad.comm.free_port import free_port
from myriad.comm.groups import close_world, local_rank, open_world
from myriad.comm.layout import Layout
from myriad.comm.rendezvous.store_secret import new_store_secret
from myriad.doctor.diagnosis import Reading
from myriad.doctor.hardware import cpu_key
from myriad.errors import RunFailedError
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import build_full

__all__ = ["check_ranks", "find_outliers", "train_bits"]

_MOST_RANKS = 64
_PRODUCT, _PRODUCT_SECONDS = 512, 0.2
_FLOOR_FLOPS, _FLOOR_BYTES = 1e9, 1e7
_ELEMENTS, _REPEATS = 2**20, 5
_SECONDS = 25.0

Answer = dict[str, Any]


def check_ranks() -> Iterator[Reading]:
    """Yield three readings; if a rank fails or hangs, a reading names it."""
    cores = _cores()
    try:
        answers = _ask(cores)
    except RunFailedError as error:
        yield Reading(name="ranks", problem=str(error))
        return
    yield _products(cores, answers)
    yield _bits(cores, answers)
    yield Reading(
        name="all-to-all among ranks",
        value=statistics.median(answer["bytes_per_second"] for answer in answers),
        unit="bytes/s",
        floor=_FLOOR_BYTES,
        hardware=cpu_key(),
        problem="" if all(answer["right"] for answer in answers) else "pieces arrived different",
        note=f"sent by each of {len(answers)} ranks, over gloo",
        remedy="look for other work on the node",
    )


def _cores() -> list[int]:
    mine = sorted(os.sched_getaffinity(0))
    spread = mine[:: -(-len(mine) // _MOST_RANKS)]
    return spread if len(spread) > 1 else mine[:1] * 2


def _products(cores: list[int], answers: list[Answer]) -> Reading:
    rates = [answer["flops_per_second"] for answer in answers]
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return Reading(
        name="matrix product of a core",
        value=rates[slowest],
        unit="FLOP/s",
        floor=_FLOOR_FLOPS,
        hardware=cpu_key(),
        measure=f"matrix product of a core, torch {torch.__version__}",
        note=f"core {cores[slowest]}, the slowest of {len(rates)}",
        remedy=f"core {cores[slowest]}: look for other work on it, heat, a lowered frequency",
    )


def _bits(cores: list[int], answers: list[Answer]) -> Reading:
    bits = {f"core {core}": answer["bits"] for core, answer in zip(cores, answers, strict=True)}
    odd = find_outliers(bits)
    problem = f"{', '.join(odd)} computed other bits than most: take the node out, its processor is faulty"
    return Reading(
        name="mini-model, bit for bit",
        value=answers[0]["bits"],
        hardware=cpu_key(),
        measure=f"mini-model, torch {torch.__version__}",
        problem=problem if odd else "",
        note=f"the same on {len(answers)} ranks",
        remedy="other bits than in the baseline: run it again, then take the node out",
    )


# Processes


def _ask(cores: list[int]) -> list[Answer]:
    """Run one forked process on each core. Raises `RunFailedError` that names the first without an answer."""
    torch.set_num_threads(1)
    port, secret, pipes, pids = free_port(), new_store_secret(), {}, []
    for rank, core in enumerate(cores):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(core, local_rank(rank, len(cores), port, secret), writer)
        os.close(writer)
        pipes[reader] = rank
        pids.append(pid)
    try:
        return _collect(pipes, cores)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for reader in pipes:
            os.close(reader)


def _collect(pipes: Mapping[int, int], cores: list[int]) -> list[Answer]:
    texts = dict.fromkeys(pipes, b"")
    waiting, end = set(pipes), time.monotonic() + _SECONDS
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
        if not ready:
            silent = ", ".join(str(cores[pipes[reader]]) for reader in sorted(waiting))
            raise RunFailedError(f"no answer from the ranks on core {silent} in {_SECONDS:g} s")
        for reader in ready:
            part = os.read(reader, 2**16)
            texts[reader] += part
            if not part:
                waiting.discard(reader)
    answers = {rank: json.loads(texts[reader] or b'{"failed": ""}') for reader, rank in pipes.items()}
    if failed := {rank: answer["failed"] for rank, answer in answers.items() if "failed" in answer}:
        first = min(failed, key=lambda rank: (failed[rank] != "", rank))  # others fail because one has died
        raise RunFailedError(f"the rank on core {cores[first]} failed: {failed[first] or 'it exited'}")
    return [answers[rank] for rank in range(len(cores))]


def _be_rank(core: int, environment: Mapping[str, str], writer: int) -> None:
    """Run one rank in a forked process; never returns."""
    try:
        os.sched_setaffinity(0, {core})
        os.environ |= environment
        answer = _measure(int(environment["WORLD_SIZE"]))
    except BaseException:
        answer = {"failed": traceback.format_exc(limit=-1).strip().splitlines()[-1]}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _measure(world: int) -> Answer:
    groups = open_world(Layout(dp=world), torch.device("cpu"))
    dist.barrier()
    flops = _flops_per_second()
    bits = train_bits(torch.device("cpu"))
    count = max(world, _ELEMENTS - _ELEMENTS % world)
    sent, got = torch.full((count,), float(dist.get_rank())), torch.empty(count)
    seconds = []
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        start_all_to_all(got, sent, groups.world).wait()
        seconds.append(time.perf_counter() - start)
    right = bool((got.view(world, -1) == torch.arange(world)[:, None]).all())
    close_world()
    rate = 4 * count * (world - 1) / world / min(seconds)
    return {"flops_per_second": flops, "bits": bits, "bytes_per_second": rate, "right": right}


def _flops_per_second() -> float:
    """Return the rate by this thread's CPU time: other work on the core hardly counts, a slow core does."""
    a, b = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_PRODUCT, _PRODUCT)
    a @ b
    products, start = 0, time.thread_time()
    while (passed := time.thread_time() - start) < _PRODUCT_SECONDS:
        a @ b
        products += 1
    return 2 * _PRODUCT**3 * products / passed


_MODEL = ModelConfig(layers=2, hidden=64, heads=2, sequence=64, vocabulary=256, activation="swiglu")
_BATCH, _STEPS, _SEED = 4, 4, 20402


def train_bits(device: torch.device) -> str:
    """Return losses and final weights as a hash, after the last loss for people to read."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    layers = build_full(_MODEL, _SEED).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    bits = hashlib.blake2s(digest_size=8)
    loss = torch.zeros(())
    for step in range(_STEPS):
        loss = _loss(layers, step, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits.update(float(loss).hex().encode())
    for parameter in layers.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    return f"loss {float(loss):.6f}, bits {bits.hexdigest()}"


def _loss(layers: torch.nn.ModuleList, step: int, device: torch.device) -> torch.Tensor:
    """Return the mean loss over targets. Tokens follow a rule that can be learned and needs no random
    numbers."""
    length = _MODEL.sequence + 1
    places = torch.arange(_BATCH * length).view(_BATCH, length) + 7 * step
    tokens = ((places * places) // 3 % 251).to(device)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    context = Context(targets=targets, samples=torch.arange(_BATCH, device=device))
    for layer in layers:
        x = layer(x, context)
    return x / targets.numel()


def find_outliers(bits: Mapping[str, str]) -> list[str]:
    """Return the names whose bits differ from the majority's; all names if there is no majority."""
    if len(set(bits.values())) <= 1:
        return []
    (most, count), *_ = Counter(bits.values()).most_common()
    return [name for name, found in bits.items() if 2 * count <= len(bits) or found != most]
