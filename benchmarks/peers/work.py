"""What every contender of `benchmarks/links/bandwidth.py` does, and how its time is taken.

A contender is a `Contender`: forward and backward of one global batch, then clipping and AdamW. Steps follow
each other without a barrier, as in training: what one step leaves under way has to be done in the next.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

__all__ = [
    "Contender",
    "EndsWithProcess",
    "Peer",
    "Timing",
    "Work",
    "clip_gradients",
    "new_adamw",
    "run_contender",
    "time_steps",
]

LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP_NORM = 1e-3, 0.1, (0.9, 0.95), 1.0


@dataclass(frozen=True)
class Work:
    """One model and one global batch, in float32."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    global_batch: int

    @property
    def tokens(self) -> int:
        """In one step, over all ranks."""
        return self.global_batch * self.sequence

    @property
    def block_parameters(self) -> int:
        """Return the parameters of one block: matrices and two norms."""
        return 12 * self.hidden**2 + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model; the output matrix is not tied."""
        ends = (2 * self.vocabulary + self.sequence + 1) * self.hidden
        return self.layers * self.block_parameters + ends

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch of a step, ``[B, S]`` each: the same on every rank."""
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.global_batch, self.sequence + 1)
        tokens = (torch.rand(shape, generator=generator) ** 2 * self.vocabulary).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def cut(self, num_stages: int) -> list[range]:
        """Layers (embedding, blocks, head) to stages, so that the largest stage multiplies least."""
        attention = 2 * self.sequence * self.hidden
        block = 12 * self.hidden**2 + attention
        costs = [0, *(block for _ in range(self.layers)), self.vocabulary * self.hidden]
        bounds = _best_bounds(costs, num_stages)
        return [range(a, b) for a, b in zip([0, *bounds], [*bounds, len(costs)], strict=True)]


def _best_bounds(costs: Sequence[int], num_stages: int) -> list[int]:
    """First layer of every stage but the first; the earliest stages are the smaller ones when in doubt."""
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for stage in range(1, num_stages + 1):
        for end in range(stage, len(costs) + 1):
            options = [
                (max(best[stage - 1, start][0], sum(costs[start:end])), [*best[stage - 1, start][1], start])
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(options)
    return best[num_stages, len(costs)][1][1:]


class Contender(Protocol):
    """One way to train, on one rank."""

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Run one step's passes; return this rank's share of the mean loss: shares of all ranks sum to it."""
        ...

    def update(self) -> None:
        """Clips, moves the parameters, forgets the gradients."""
        ...

    def close(self) -> None:
        """Leaves the world."""
        ...


class EndsWithProcess:
    """Leaves the world by ending: freeing a process group that DDP's reducer still holds can wait for ever
    (its destructor joins threads with the interpreter lock held; torch 2.13)."""

    def close(self) -> None:
        """Nothing."""


@runtime_checkable
class Peer(Contender, Protocol):
    """A contender of `plain_gpt`, whose gradients can be checked."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of what this rank holds, by the names of `plain_gpt`. On every rank at once."""
        ...


@dataclass(frozen=True)
class Timing:
    """One visit to the links, as one rank saw it."""

    seconds: list[float]
    """Seconds of each timed step."""
    losses: list[float]
    """Means over the global batch, also of the step that warmed up."""
    sent_bytes: float
    """That left this rank's host in a step, as its eth0 counts (a header for each segment of up to 64 KiB); 0
    where that is not known."""


def time_steps(step: Callable[[int], float], num_steps: int) -> Timing:
    """One step to warm up, then the timed ones.

    Nothing happens in between: in a pause, what the step before left under way would travel for free. So the
    loss shares that ``step`` gives are added up afterwards."""
    shares, seconds = [step(0)], list[float]()
    sent_before = _sent_bytes()
    for index in range(1, num_steps + 1):
        start = time.perf_counter()
        shares.append(step(index))
        seconds.append(time.perf_counter() - start)
    sent = (_sent_bytes() - sent_before) / num_steps
    losses = torch.tensor(shares, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(losses)
    return Timing(seconds, losses.tolist(), sent)


def _sent_bytes() -> int:
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def run_contender(make: Callable[[Work], Contender], work: Work, num_steps: int) -> Timing:
    """Trains on the work's batches."""
    contender = make(work)

    def step(index: int) -> float:
        loss = contender.forward_backward(*work.batch(index))
        contender.update()
        return loss

    timing = time_steps(step, num_steps)
    contender.close()
    return timing


def new_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused; matrices decay, norms do not. DTensors and plain tensors cannot share a fused update."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.dim() >= 2, _is_dtensor(parameter)].append(parameter)
    given = [
        {"params": members, "weight_decay": WEIGHT_DECAY if decays else 0.0}
        for (decays, _), members in groups.items()
    ]
    return torch.optim.AdamW(given, lr=LEARNING_RATE, betas=BETAS, fused=True)


def clip_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, plain_copies: int = 1
) -> None:
    """By the global norm, with one small all-reduce over ``group``, whose ranks hold different parameters or
    parts of them. ``plain_copies``: ranks of the group that hold the same of what is no DTensor."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [_local(gradient) for gradient in gradients]
    shares = torch.tensor([1.0 / _num_copies(gradient, plain_copies) for gradient in gradients])
    squares = torch.stack(torch._foreach_norm(local)) ** 2
    total = (squares * shares).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    torch._foreach_mul_(local, torch.clamp(CLIP_NORM / (total.sqrt() + 1e-6), max=1.0))


def _is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor. Its module takes a second to import, so it is not asked."""
    return hasattr(tensor, "device_mesh")


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if _is_dtensor(gradient) else gradient


def _num_copies(gradient: Any, plain_copies: int) -> int:
    """Ranks that hold the same values."""
    if not _is_dtensor(gradient):
        return plain_copies
    placements, mesh = gradient.placements, gradient.device_mesh
    assert not any(one.is_partial() for one in placements), "a gradient that is not summed up"
    return math.prod(mesh.size(dim) for dim, one in enumerate(placements) if one.is_replicate())
