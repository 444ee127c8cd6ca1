"""Where a run was, as a tensor: 4 KiB of JSON, so that it travels, is hashed and is found like any other."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from myriad.checkpoint.storing import PROGRESS
from myriad.model.rectangle import Rectangle

__all__ = ["decode_progress", "progress_rectangle", "write_progress"]

_BYTES = 4096


def progress_rectangle(progress: Mapping[str, Any] | None = None) -> Rectangle:
    """Of what is given, or room for what is loaded."""
    values = torch.full((_BYTES,), ord(" "), dtype=torch.uint8)
    if progress is not None:
        write_progress(values, progress)
    return Rectangle(PROGRESS, (_BYTES,), (0,), values)


def write_progress(values: torch.Tensor, progress: Mapping[str, Any]) -> None:
    """Into ``values``, ``[4096]``."""
    text = json.dumps(progress).encode()
    assert len(text) <= _BYTES, "a few numbers"
    values.numpy().data[:] = text.ljust(_BYTES)


def decode_progress(values: torch.Tensor) -> dict[str, Any]:
    """`write_progress` undone."""
    progress: dict[str, Any] = json.loads(values.numpy().tobytes())
    return progress
