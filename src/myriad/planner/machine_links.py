"""From timings of transfers to the constants of a link. No devices here: others take the timings.

transfers            seconds of an empty one, and a rate: a line through sizes
tensor parallelism   the same of its crossings, from what they add to real blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from myriad.planner.cluster import Link
from myriad.planner.least_squares import ENDLESS, relative_fit

__all__ = ["Line", "TensorTime", "fit_line", "fit_tensor"]

_EXPOSED_CROSSINGS, _HIDDEN_CROSSINGS = 8.0, 2.0
"""Of a block: a gather and a scatter for attention and MLP each, in both directions, and in the backward what
the gathers brought, again."""
_TENSOR_TURNS, _MOST_BUSY = 5, 2.0


@dataclass(frozen=True)
class TensorTime:
    """What crossings add to one block and micro-batch, forward and backward, cut among two ranks."""

    num_bytes: float
    """Of the tensor that crosses, whole."""
    compute_seconds: float
    """Of the block without crossings."""
    added_seconds: float
    """When each is waited for where it is posted."""
    num_parts: float
    added_overlapped_seconds: float
    """When so many parts take turns, and one's crossing travels behind another's compute."""
    added_processor_seconds: float
    """Of a core, in ``added_seconds``."""


@dataclass(frozen=True)
class Line:
    """Seconds of a transfer: an empty one, and what each byte adds."""

    empty_seconds: float
    bytes_per_second: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """``empty + bytes / rate``."""
    empty, each = relative_fit(np.stack([np.ones(len(sizes)), np.asarray(sizes)], 1), np.asarray(seconds))
    return Line(float(empty), float(1 / max(each, 1 / ENDLESS)))


def fit_tensor(times: Sequence[TensorTime], node: Link) -> Link:
    """Tensor-parallel crossings as they are in blocks, as `myriad.planner.layers` counts them: cut in parts,
    each part begins anew, and all but the first travel behind compute. They take of it what they make worse
    there, and at least what they work."""
    halves = np.array([one.num_bytes / 2 for one in times])
    parts = np.array([one.num_parts for one in times])
    least = 1e-3 * np.array([one.added_seconds for one in times]).max()
    added, overlapped = (
        np.maximum([getattr(one, name) for one in times], least)
        for name in ("added_seconds", "added_overlapped_seconds")
    )
    compute, busy = np.array([one.compute_seconds for one in times]), node.busy_ratio
    work = float(np.median([one.added_processor_seconds for one in times] / added))
    for _ in range(_TENSOR_TURNS):
        count = _EXPOSED_CROSSINGS + _HIDDEN_CROSSINGS * busy
        empty, each = relative_fit(count * np.stack([np.ones(len(times)), halves], 1), added)
        whole = _EXPOSED_CROSSINGS * (empty * parts + each * halves)
        behind = np.minimum(whole * (1 - 1 / parts), 2 / 3 * compute)  # forward, gradients of inputs
        ratios = (overlapped - whole + behind) / (behind + _HIDDEN_CROSSINGS * (empty + each * halves))
        if (parts > 1).any():
            busy = float(np.clip(np.median(ratios[parts > 1]), min(1.0, work), _MOST_BUSY))
    return node.model_copy(
        update={
            "bytes_per_second": 1 / max(each, 1 / ENDLESS),
            "launch_seconds": max(0.0, empty - node.latency_seconds),
            "busy_ratio": busy,
        }
    )
