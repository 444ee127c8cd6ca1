"""Triton's interpreter runs kernels on a CPU. It must be asked for before Triton is imported, by whichever
test comes first; nothing else goes by it unless a job asks for Triton's kernels by name."""

import os
import sys
from pathlib import Path

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

_COMPILES = "test_congestion_study.py"
"""Calls every simulator of `myriad.network`, each of which is compiled once and kept on disk."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this folder alone, run what compiles first, so that other workers find it on disk later, and then
    the files with slow tests: a worker that gets one last keeps the others waiting."""
    if not all(item.path.is_relative_to(Path(__file__).parent) for item in items):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    place = {path: at for at, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (item.path.name != _COMPILES, item.path not in slow, -place[item.path]))
