"""Triton's interpreter runs kernels on a CPU; it must be asked for before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
