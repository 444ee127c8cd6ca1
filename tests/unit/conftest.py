"""Triton's interpreter runs kernels on a CPU. It must be asked for before Triton is imported, by whichever
test comes first; nothing else goes by it unless a job asks for Triton's kernels by name."""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first: a worker that gets one last keeps the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
