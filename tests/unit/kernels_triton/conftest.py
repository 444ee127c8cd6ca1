"""Needs Triton's interpreter (`tests/unit/conftest.py`)."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders that are tested in the same process may have imported Triton without it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "Triton was imported before its interpreter was asked for: test this folder by itself"
        for item in items:
            if "kernels_triton" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason))
