"""The tiny corpora and foreign checkpoints of the single-process tests serve here too."""

import sys
from pathlib import Path

for folder in ("data", "checkpoint"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / folder))
