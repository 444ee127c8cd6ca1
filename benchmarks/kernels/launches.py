"""Kernels that one more layer starts on a GPU, forward and backward, and the bytes of what they are given and
give (`tests/unit/fake_cuda/launch_counter.py`), counted on a fake CUDA device.

    python benchmarks/kernels/launches.py             every shape of docs/benchmarks/launches.md
    python benchmarks/kernels/launches.py --operators NAME    one shape, operator by operator
    python benchmarks/kernels/launches.py --graphs    steps of one rank with and without CUDA graphs, and what
                                              starting costs there as the planner counts it

Needs a CPU build of PyTorch, Triton and a C++ compiler (`tests/unit/fake_cuda`).
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

_FAKE = Path(__file__).parents[2] / "tests" / "unit" / "fake_cuda"
sys.path.insert(0, str(_FAKE))

from fake_library import LIBRARY, library, missing  # noqa: E402
from step_cases import CAPTURED, LAYERS  # noqa: E402

from myriad.planner.cluster_config import Accelerator  # noqa: E402
from myriad.recipes import read_recipe  # noqa: E402
from myriad.system.state_folder import cache_folder  # noqa: E402


def _counted(names: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    environment = os.environ | {LIBRARY: str(library(cache_folder() / "fake_cuda"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(_FAKE / "run_cases.py"), *names]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in found}


def _print_graphs() -> None:
    """Each graph is one launch of the host's; the kernels in it cost what the planner counts in a graph."""
    chip = Accelerator(**read_recipe("accelerators", "h100-sxm-80gb", "accelerator"))
    one, captured = chip.launch_seconds, chip.captured_launch_seconds
    heads = ("one by one", "with graphs: by the host", "in graphs", "planner: ms", "with graphs: ms")
    print(f"| one rank, one step | {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|")
    for name, case in _counted(list(CAPTURED)).items():
        found = case["launches"]
        before = 1e3 * one * found["one_by_one"]
        after = 1e3 * (one * found["by_host"] + captured * found["in_graphs"])
        host = f"{found['by_host']:,}, {found['graphs']} of them graphs"
        cells = (f"{found['one_by_one']:,}", host, f"{found['in_graphs']:,}", f"{before:.1f}", f"{after:.1f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", metavar="NAME", choices=LAYERS, help="one shape, operator by operator")
    parser.add_argument("--graphs", action="store_true", help="steps with and without CUDA graphs")
    arguments = parser.parse_args()
    asked = arguments.operators
    if reason := missing():
        sys.exit(f"launches.py: {reason}")
    if arguments.graphs:
        return _print_graphs()
    counted = _counted([asked] if asked else list(LAYERS))
    if asked:
        launches, moved = counted[asked]["launches"], counted[asked]["moved"]
        print(f"| {asked} | launches a layer | MB a layer |\n|---|---|---|")
        for operator, count in sorted(launches.items(), key=lambda one: -one[1]):
            print(f"| {operator} | {count} | {_megabytes(moved.get(operator, 0))} |")
        return
    print("| | launches a layer | MB a layer |\n|---|---|---|")
    for name, layer in counted.items():
        moved = sum(layer["moved"].values())
        print(f"| {name} | {sum(layer['launches'].values())} | {_megabytes(moved)} |")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f}"


if __name__ == "__main__":
    main()
