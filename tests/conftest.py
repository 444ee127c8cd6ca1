"""Lets tests of several processes share their harness, and holds for every test what time must not decide."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "processes"))

# How long an example takes is this machine's business, which others may use as well.
settings.register_profile("myriad", deadline=None)
settings.load_profile("myriad")
