"""`torch.cuda` as Myriad uses it, for a device that never computes: streams, events, properties, generators.

What makes the host wait is noted with the line of Myriad that asked for it: events and devices that are
waited for here, numbers that are read in `launch_counter`.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import myriad

DEVICE = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
_OWN = str(Path(myriad.__file__).parent)

waits: Counter[str] = Counter()
"""Times that the host waited for the device, by what for and where."""


def note_wait(what: str) -> None:
    """Count one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    place = frame.f_code.co_filename.removeprefix(f"{_OWN}/")
    waits[f"{what} in {place}:{frame.f_code.co_name}"] += 1


class Stream:
    """In which nothing waits."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.device = DEVICE

    def wait_stream(self, stream: "Stream") -> None: ...
    def wait_event(self, event: "Event") -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        note_wait("stream")


class Event:
    """That has always passed."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1.0

    def synchronize(self) -> None:
        note_wait("event")


class _Generator:
    """A CUDA generator's state is 16 bytes in the host's memory."""

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None: ...

    def initial_seed(self) -> int:
        return 0

    def get_offset(self) -> int:
        return 0

    def manual_seed(self, seed: int) -> None: ...
    def set_offset(self, offset: int) -> None: ...


_HERE = Stream()


@contextmanager
def _entered(what: Any) -> Iterator[None]:
    yield


@contextmanager
def fake_torch_cuda() -> Iterator[None]:
    """`torch.cuda` is that of one H100 of eight inside."""
    properties = SimpleNamespace(name=NAME, multi_processor_count=132, total_memory=80 * 2**30)
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: _Generator().get_state(),
        "set_rng_state": lambda state, device=None: None,
        "max_memory_allocated": lambda device=None: 0,
        "synchronize": lambda device=None: note_wait("device"),
        "current_stream": lambda device=None: _HERE,
        "default_generators": (_Generator(),) * 8,
        "stream": _entered,
        "device": _entered,
        "Stream": Stream,
        "Event": Event,
    }
    with mock.patch.multiple(torch.cuda, **functions):
        yield
