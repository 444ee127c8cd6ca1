"""The tiny corpora and foreign checkpoints of the single-process tests serve here too.

One thread each: models are tiny and processes are more than there are cores, so a thread that spins takes the
core of the one for which it waits. With two threads, tests that train in this process took 15 times the
processor time.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import end_reused_ranks

torch.set_num_threads(1)

for folder in ("data", "checkpoint"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))


@pytest.fixture(scope="module", autouse=True)
def reused_ranks() -> Iterator[None]:
    """End the processes that tests of a file share as ranks."""
    yield
    end_reused_ranks()


@pytest.fixture(scope="session")
def dynamo() -> None:
    """Import ``torch._dynamo`` before ranks are forked that would each import it, which takes a core for a
    second: torch needs it in a dispatch mode, and to run a layer on the meta device, where a rank finds the
    shapes between stages of a model that does not state them."""
    importlib.import_module("torch._dynamo")
