"""The tiny corpora and foreign checkpoints of the single-process tests serve here too.

One thread each: models are tiny and processes are more than there are cores, so a thread that spins takes the
core of the one for which it waits. With two threads, tests that train in this process took 15 times the
processor time.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

for folder in ("data", "checkpoint"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))
