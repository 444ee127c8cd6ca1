"""AdamW and LAMB over flat float32 memory as Triton kernels: each value is read and written once.

    AdamW   read value, gradient, m, v             write value, m, v                      28 bytes an element
    LAMB    read value, gradient, m, v             write u over the gradient, m, v, and for each block the
                                                   sums of squares of value and u         28
            (the sums of all ranks give a rate for each parameter)
            read value, u                          write value                            12

m and v decay with beta1 and beta2. The direction is m^ / (sqrt(v^) + epsilon), with both corrected for their
start at zero (Kingma & Ba, arXiv 1412.6980, algorithm 1; AdamW: arXiv 1711.05101, algorithm 2; LAMB: arXiv
1904.00962, algorithm 2). The gradient is scaled while it is read.

A block belongs to one parameter, so that its sums do too; the last block of a parameter is shorter. The sums
of a block are float32, all further sums float64 (`myriad.optim.parameter_norms` gives the reason), in a fixed
order.
"""

# mypy: disable-error-code="untyped-decorator"
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from myriad.kernels.triton.launch import launch

__all__ = ["Blocks", "Coefficients", "adamw", "cut_blocks", "lamb_move", "lamb_update"]

_BLOCK = 2048
_WARPS = 8


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients of one step, the ``step``-th from 1."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    gradient_scale: float
    step: int

    def as_arguments(self) -> tuple[float, ...]:
        """Return the kernels' arguments. Values that do not depend on the element are computed here, in
        float64."""
        return (
            self.gradient_scale,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            1 / (1 - self.beta1**self.step),
            (1 - self.beta2**self.step) ** -0.5,
            self.epsilon,
        )


class Blocks(NamedTuple):
    """Parts of flat memory, each of one parameter and at most `_BLOCK` long."""

    starts: torch.Tensor  # int64 [blocks]
    stops: torch.Tensor  # int64 [blocks]
    owners: torch.Tensor  # int64 [blocks]: row of the table of parameters
    runs: list[tuple[int, int]]
    """(parameter, number of blocks) of each piece, in order."""


def cut_blocks(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> Blocks:
    """Cut pieces, given as (parameter, start, stop), into blocks."""
    parts = [torch.arange(start, stop, _BLOCK) for _, start, stop in pieces]
    starts = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    table = torch.tensor([(owner, stop) for owner, _, stop in pieces], dtype=torch.int64).view(-1, 2)
    owners, ends = table.repeat_interleave(counts, 0).unbind(1)
    stops = torch.minimum(starts + _BLOCK, ends)
    runs = [(piece[0], len(part)) for piece, part in zip(pieces, parts, strict=True)]
    return Blocks(starts.to(device), stops.to(device), owners.contiguous().to(device), runs)


@triton.jit
def _direction(
    gradients: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    correction1: tl.tensor,
    root_correction2: tl.tensor,
    epsilon: tl.tensor,
) -> tl.tensor:
    g = tl.load(gradients + at, mask=inside, other=0.0) * scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0) * beta1 + g * rest1
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0) * beta2 + g * g * rest2
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    return m * correction1 / (tl.sqrt(v) * root_correction2 + epsilon)


@triton.jit
def adamw_kernel(
    values: tl.tensor,
    gradients: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    size: tl.tensor,
    learning_rate: tl.tensor,
    kept_ratio: tl.tensor,
    scale: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    correction1: tl.tensor,
    root_correction2: tl.tensor,
    epsilon: tl.tensor,
    stays: tl.tensor,
    MAY_STAY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if MAY_STAY:
        size = tl.where(tl.load(stays) == 0.0, size, 0)
    inside = at < size
    direction = _direction(
        gradients,
        exp_avg,
        exp_avg_sq,
        at,
        inside,
        scale,
        beta1,
        rest1,
        beta2,
        rest2,
        correction1,
        root_correction2,
        epsilon,
    )
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(values + at, value * kept_ratio - direction * learning_rate, mask=inside)


@triton.jit
def lamb_update_kernel(
    values: tl.tensor,
    gradients: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    squares: tl.tensor,
    weight_decay: tl.tensor,
    scale: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    correction1: tl.tensor,
    root_correction2: tl.tensor,
    epsilon: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = at < tl.load(stops + block)
    direction = _direction(
        gradients,
        exp_avg,
        exp_avg_sq,
        at,
        inside,
        scale,
        beta1,
        rest1,
        beta2,
        rest2,
        correction1,
        root_correction2,
        epsilon,
    )
    value = tl.load(values + at, mask=inside, other=0.0)
    update = tl.where(inside, direction + value * weight_decay, 0.0)
    tl.store(gradients + at, update, mask=inside)
    tl.store(squares + 2 * block, tl.sum(value * value, 0))
    tl.store(squares + 2 * block + 1, tl.sum(update * update, 0))


@triton.jit
def lamb_move_kernel(
    values: tl.tensor,
    updates: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    owners: tl.tensor,
    rates: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = at < tl.load(stops + block)
    rate = tl.load(rates + tl.load(owners + block))
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(values + at, value - tl.load(updates + at, mask=inside, other=0.0) * rate, mask=inside)


def adamw(
    values: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    coefficients: Coefficients,
    stays: torch.Tensor | None = None,
) -> None:
    """Update ``values`` and both moments, all ``[n]`` float32, in place. Gradients stay unchanged. If the
    number ``stays`` is not 0, everything stays unchanged."""
    rate = coefficients.learning_rate
    launch(
        adamw_kernel,
        (triton.cdiv(values.numel(), _BLOCK),),
        values,
        gradients,
        exp_avg,
        exp_avg_sq,
        values.numel(),
        rate,
        1 - rate * coefficients.weight_decay,
        *coefficients.as_arguments(),
        values if stays is None else stays,
        MAY_STAY=stays is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def lamb_update(
    values: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    blocks: Blocks,
    coefficients: Coefficients,
) -> torch.Tensor:
    """Write ``u`` over the gradients and update the moments. Return the sums of squares of values and ``u``,
    ``[blocks, 2]``."""
    squares = values.new_empty(len(blocks.starts), 2)
    launch(
        lamb_update_kernel,
        (len(blocks.starts),),
        values,
        gradients,
        exp_avg,
        exp_avg_sq,
        blocks.starts,
        blocks.stops,
        squares,
        coefficients.weight_decay,
        *coefficients.as_arguments(),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return squares


def lamb_move(values: torch.Tensor, updates: torch.Tensor, blocks: Blocks, rates: torch.Tensor) -> None:
    """Compute ``values -= rate u``, with the rate of each block's parameter. ``rates``: float32
    ``[num_parameters]``."""
    arguments = (values, updates, blocks.starts, blocks.stops, blocks.owners, rates)
    launch(lamb_move_kernel, (len(blocks.starts),), *arguments, BLOCK=_BLOCK, num_warps=_WARPS)
