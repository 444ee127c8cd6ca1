"""Needs Triton's interpreter (`tests/unit/conftest.py`)."""

import importlib.util
import os
from importlib.metadata import version

import pytest


def _number(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def _missing() -> str:
    """What the tests of this folder want; Triton 3.6 (that of torch 2.11) makes numbers of arrays in a way
    that numpy 2.4 took away."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton was imported before its interpreter was asked for: test this folder by itself"
    if importlib.util.find_spec("triton") and _number("triton") < (3, 7) and _number("numpy") >= (2, 4):
        return "the interpreter of Triton before 3.7 needs numpy before 2.4"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders that are tested in the same process may have imported Triton without it."""
    if reason := _missing():
        for item in items:
            if "kernels_triton" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason))
