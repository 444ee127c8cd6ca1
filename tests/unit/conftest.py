"""Triton's interpreter runs kernels on a CPU. It must be asked for before Triton is imported, by whichever
test comes first; nothing else goes by it unless a job asks for Triton's kernels by name."""

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
