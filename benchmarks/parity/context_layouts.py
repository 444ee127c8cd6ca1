"""Context parallelism in every layout of eight ranks at most, in real processes, against one process.

    python benchmarks/parity/context_layouts.py --folder FOLDER [--steps 3] [--every N]

`layouts` lists every grid of cp, ulysses, dp, tp and pp with two to eight ranks that share sequences, each
with all ZeRO levels. Models (windows, few key/value heads, latent attention, sinks and bounded scores,
experts with a balance loss, prediction layers, dropout), packed documents (cut, and whole), schedules,
recomputation, overlap and optimizers take turns. Jobs train, are compared and kept as in `expert_layouts`.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from expert_layouts import GLOBAL_BATCH, MOST_RANKS, OPTIMIZERS, RECOMPUTE, Case, Job, print_table, run

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"dropout": 0.1},
    "window": {"window": 6, "window_pattern": (True, False), "kv_heads": 2, "qk_norm": "head"},
    "latent": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "sinks": {"attention_sinks": True, "attention_softcap": 5.0, "kv_heads": 2, "activation": "swiglu"},
    "learned": {"position": "learned", "norm": "layer", "bias": True},
    "predictions": {"prediction_layers": 1, "rotary_scaling": {"kind": "yarn", "factor": 4.0}},
    "experts": {"experts": 8, "expert_hidden": 16, "balance_loss": 0.1, "router_z_loss": 0.01},
}
HEADS = 4


@dataclass(frozen=True)
class ContextJob(Job):
    """A job of the list."""

    packed: bool = False

    def case(self, steps: int) -> Case:
        model = {"layers": 2, "sequence": 32} | MODELS[self.model]
        optimizer = {"name": self.optimizer}
        return Case(
            self.layout, model, optimizer, steps, GLOBAL_BATCH, overlap=self.overlap, packed=self.packed
        )

    @property
    def name(self) -> str:
        return super().name + (" packed" if self.packed else "")


def grids() -> Iterator[dict[str, int]]:
    """Every grid of at most eight ranks that share sequences."""
    for cp, ulysses, dp, tp, pp in product((2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2)):
        fits = ulysses <= cp and ulysses * tp <= HEADS
        if cp * dp * tp * pp <= MOST_RANKS and fits:
            yield {"cp": cp, "ulysses": ulysses, "dp": dp, "tp": tp, "pp": pp}


def layouts() -> list[ContextJob]:
    """The jobs of the list."""
    found: list[ContextJob] = []
    for grid, zero in product(grids(), range(4)):
        turn = len(found)
        model = list(MODELS)[turn % len(MODELS)]
        layout = {
            **grid,
            "zero": zero,
            "schedule": "zero-bubble" if grid["pp"] > 1 and turn % 2 else "1f1b",
            "recompute": RECOMPUTE[turn % 3],
            "micro_batch": 1 + turn // 2 % 2,
        }
        packed = turn % 4 == 1
        if packed and turn % 8 == 1 and grid["cp"] > grid["ulysses"]:
            layout["whole_documents"] = True
        if model == "experts" and (grid["dp"] * grid["cp"]) % 4 == 0:
            layout["ep"] = 4
        overlap = {"tensor_chunks": 2} if turn % 5 else {"tensor": None, "data": False}
        found.append(ContextJob(layout, model, OPTIMIZERS[turn % 11 % 3], overlap, packed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Context parallelism in every layout against one process.")
    parser.add_argument("--folder", type=Path, help="keep finished jobs here, and continue from them")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="train each N-th job only")
    options = parser.parse_args()
    jobs = layouts()[:: options.every]
    print(f"{len(jobs)} layouts", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(jobs, options.steps, folder / "context_layouts.jsonl")
    if not print_table(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
