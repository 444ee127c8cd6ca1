"""The tiny corpora and foreign checkpoints of the single-process tests serve here too.

One thread each: models are tiny and processes are more than there are cores, so a thread that spins takes the
core of the one for which it waits. With two threads, tests that train in this process took 15 times the
processor time.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

for folder in ("data", "checkpoint"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))


@pytest.fixture(scope="session")
def dynamo() -> None:
    """Import ``torch._dynamo`` before ranks are forked that would each import it, which takes a core for a
    second: torch needs it in a dispatch mode, and to run a layer on the meta device, where a rank finds the
    shapes between stages of a model that does not state them."""
    importlib.import_module("torch._dynamo")
