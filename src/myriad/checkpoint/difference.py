"""Which tensors of two checkpoints differ, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from myriad.checkpoint.store import load_model

__all__ = ["Difference", "compare_checkpoints"]


@dataclass(frozen=True)
class Difference:
    """Of one tensor."""

    name: str
    what: str | None
    """Why there is no figure: one side lacks it, or the shapes or types differ."""
    largest: float = 0.0
    """Absolute, over the elements."""
    relative: float = 0.0
    """That over the largest element of the first."""


def compare_checkpoints(first: Path | str, second: Path | str) -> Iterator[Difference]:
    """Every tensor that is not the same to the bit, by name."""
    a, b = load_model(first, ""), load_model(second, "")
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield Difference(name, f"only in the {'first' if name in a else 'second'}")
        elif a[name].shape != b[name].shape:
            yield Difference(name, f"{list(a[name].shape)} and {list(b[name].shape)}")
        elif a[name].dtype != b[name].dtype:
            yield Difference(name, f"{_kind(a[name])} and {_kind(b[name])}")
        elif not _same_bits(a[name], b[name]):
            yield _difference(name, a[name].double(), b[name].double())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where an element is no number."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    largest = float((a - b).abs().max())
    return Difference(name, None, largest, largest / max(float(a.abs().max()), 1e-300))
