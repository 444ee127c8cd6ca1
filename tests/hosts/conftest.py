"""Hosts for tests (`benchmarks/common/hosts.py` as a fixture), and the tiny corpora of the unit tests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))
for _folder in ("", "common", "checkpoint", "links", "network", "supervise"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / _folder))

from hosts import Hosts, missing  # noqa: E402


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    """``hosts(2, rate="200mbit")`` makes hosts that last as long as the test."""
    if problem := missing():
        pytest.skip(f"hosts cannot be made: {problem}")
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Hosts(*arguments, **options))
