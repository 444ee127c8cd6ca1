"""Kernels that one more layer starts on a GPU, forward and backward, counted on a fake CUDA device.

    python benchmarks/launches.py                     every shape of docs/gpu.md
    python benchmarks/launches.py --operators NAME    one shape, operator by operator

Needs a CPU build of PyTorch, Triton and a C++ compiler (`tests/unit/fake_cuda`).
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

_FAKE = Path(__file__).parents[1] / "tests" / "unit" / "fake_cuda"
sys.path.insert(0, str(_FAKE))

from fake_library import LIBRARY, library, missing  # noqa: E402
from step_cases import LAYERS  # noqa: E402

from myriad.data.cache import cache_folder  # noqa: E402


def _counted(names: list[str]) -> dict[str, dict[str, int]]:
    environment = os.environ | {LIBRARY: str(library(cache_folder() / "fake_cuda"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(_FAKE / "run_cases.py"), *names]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {one["name"]: one["launches"] for one in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", metavar="NAME", choices=LAYERS, help="one shape, operator by operator")
    asked = parser.parse_args().operators
    if reason := missing():
        sys.exit(f"launches.py: {reason}")
    counted = _counted([asked] if asked else list(LAYERS))
    if asked:
        print(f"| {asked} | launches a layer |\n|---|---|")
        for operator, count in sorted(counted[asked].items(), key=lambda one: -one[1]):
            print(f"| {operator} | {count} |")
        return
    print("| | launches a layer |\n|---|---|")
    for name, launches in counted.items():
        print(f"| {name} | {sum(launches.values())} |")


if __name__ == "__main__":
    main()
