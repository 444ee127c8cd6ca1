"""Lets tests of several processes share their harness."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "processes"))
