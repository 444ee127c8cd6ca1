"""Makes the scripts in the folders of benchmarks/ importable by their names: the table of decoders is one."""

import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS), *map(str, sorted(_BENCHMARKS.glob("*/")))]
