"""If this breaks, a kernel that passes in the interpreter does not compile for an H100 or H200: seen here
without one. Triton brings its own assembler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
def test_every_kernel_compiles_to_a_cubin_for_sm_90(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = done.stdout.split()
    assert len(set(kernels)) == 13 and all(line.endswith(".cubin") for line in kernels)
