"""How much of an iteration on one GPU is the starting of operators, as the planner counts it, and what CUDA
graphs leave of it.

    python benchmarks/kernels/gpu_launches.py [h100-sxm-80gb ...]

Each operator is counted with ``accelerator.launch_seconds``, however small it is; the share is what an
iteration of four micro-batches would be shorter without. In a graph it is ``captured_launch_seconds``.
Predicted, not measured.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from gpu_training import GPT2, GPT_13B, LLAMA_8B, TrainingCase, single_gpu
from myriad.planner.cluster_config import Accelerator
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulator import simulate
from myriad.recipes import read_recipe

CASES = (
    TrainingCase("GPT-2 124M, 1024", GPT2),
    TrainingCase("GPT 1.3B, 2048", GPT_13B),
    TrainingCase("Llama-3-8B, 10 layers, 2048", LLAMA_8B.model_copy(update={"layers": 10, "sequence": 2048})),
)
MICRO_BATCHES = (1, 4, 16)


def seconds(case: TrainingCase, accelerator: Accelerator) -> float:
    """Return the predicted seconds of an iteration."""
    return simulate(Costs(case.work(), single_gpu(accelerator)), spans=False).seconds


def cell(case: TrainingCase, accelerator: Accelerator) -> str:
    """Milliseconds of a micro-batch, the share of starting operators, and the milliseconds with graphs."""
    whole = seconds(case, accelerator)
    rest = seconds(case, accelerator.model_copy(update={"launch_seconds": 0.0}))
    captured = seconds(replace(case, cuda_graphs=True), accelerator)
    return f"{1e3 * whole / 4:.1f} ms, {1 - rest / whole:.1%}; {1e3 * captured / 4:.1f} ms"


def main(names: Sequence[str]) -> None:
    """A table for each accelerator."""
    for name in names:
        accelerator = Accelerator(**read_recipe("accelerators", name, "accelerator"))
        print(f"| {accelerator.name} | {' | '.join(f'micro-batch {n}' for n in MICRO_BATCHES)} |")
        print("|---" * (1 + len(MICRO_BATCHES)) + "|")
        for case in CASES:
            cells = [cell(replace(case, micro_batch=count), accelerator) for count in MICRO_BATCHES]
            print(f"| {case.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["h100-sxm-80gb"])
