"""One GPU: kernels, training, and what the planner says of both; tables on the screen.

    python benchmarks/kernels/gpu.py                    all of it, in under 8 minutes
    python benchmarks/kernels/gpu.py --device cpu --small       the same harness on a CPU, not for its figures
    python benchmarks/kernels/gpu.py --predict h100-sxm-80gb h200-sxm-141gb  predictions; needs no GPU
    python benchmarks/kernels/gpu.py --choose           times every path of attention, and writes which is the
                                                quickest where Myriad looks for it

Kernels: forward and backward, the median of as many rounds as fit in a fifth of a second, as a share of what
a copy (of memory) or a large matrix product reaches in the same minute. Training: steps of Myriad's engine
(forward, backward, clipping, AdamW) after two that are not counted. MFU is told twice: counting all pairs
of a sequence, as most do, and the attended ones alone. What does not finish before `--seconds` is left out,
and said so.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import gpu_kernels
import gpu_training
from myriad.kernels.attention import times_path
from myriad.system.whole_file import write_whole

PUBLISHED = (
    "torchtitan's whole Llama 3 8B on H100s of 500 W: 6,667 tokens/s a GPU in bf16, 8,532 in float8\n"
    "(torchtitan, benchmarks/llama3_h100_202412_torchtitan.md); here one GPU, and as many layers as it holds"
)


@dataclass
class Clock:
    """How much of the time is left."""

    seconds: float
    began: float

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--only", choices=("kernels", "training"), help="a part")
    parser.add_argument("--seconds", type=float, default=450, help="nothing new is begun after")
    parser.add_argument("--predict", nargs="+", metavar="ACCELERATOR", help="recipes; measure nothing")
    parser.add_argument("--choose", action="store_true", help="time attention's paths and keep the quickest")
    parser.add_argument("--out", type=Path, help="of --choose; off: where Myriad looks")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile's contenders")
    return parser.parse_args()


def choose(device: torch.device, options: argparse.Namespace) -> None:
    """Times every path that a shape has, and writes the quickest."""
    found = gpu_kernels.quickest_paths(device, options.small)
    target = options.out or times_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps({"attention": [one._asdict() for one in found]}, indent=1))
    print(f"{len(found)} shapes -> {target}")


def measure(device: torch.device, options: argparse.Namespace) -> None:
    """The tables."""
    clock = Clock(options.seconds, time.monotonic())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (no figure here counts)"
    print(f"{name}, torch {torch.__version__}")
    if options.only != "training":
        ceilings = gpu_kernels.ceilings(device, options.small)
        gpu_kernels.print_ceilings(ceilings)
        budget = clock.seconds * 0.35
        gpu_kernels.print_kernels(
            device,
            ceilings,
            small=options.small,
            compiles=not options.no_compile,
            deadline=clock.began + budget,
        )
    if options.only != "kernels":
        gpu_training.print_training(device, options.small, not options.no_compile, lambda: clock.left)
        print(PUBLISHED)
    print(f"took {clock.seconds - clock.left:.0f} s")


def main() -> None:
    """Measures, predicts or chooses."""
    options = parse()
    if options.predict:
        for accelerator in options.predict:
            gpu_training.print_predictions(accelerator)
        print(PUBLISHED)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "gpu.py: no CUDA device here: --device cpu --small tests the harness, --predict tells"
        )
    device = torch.device(options.device)
    if device.type == "cpu":  # threads that wait for each other take seconds where another process computes
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    (choose if options.choose else measure)(device, options)


if __name__ == "__main__":
    main()
