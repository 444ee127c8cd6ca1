"""MegaScale-MoE's ablation in simulation: its 352B model on 240 H800, in four layouts.

    python benchmarks/planner/expert_ablation.py

Table 5 of arXiv 2505.11432 gives normalized throughput with batch 720 for

    1  baseline                        attention and experts cut by tensor parallelism, nothing overlaps
    2  with SP + EP                    attention's sequences shared (Ulysses), whole experts, both in a node
    3  with inter-operator overlap     communication behind independent operators
    4  with intra-operator overlap     tiles of an all-to-all behind the product that needs or makes them

and table 3 the seconds of the whole system, 21.61. Here, in that order: tp = 8 without overlap; cp, ulysses
and ep of 8; parts of a micro-batch that take turns (``overlap.tensor``); tokens behind another micro-batch
(``overlap.pairs``). The last two hide tokens in other ways than the paper's kernels.

pp is 15 and dp 2. Micro-batch (1 here), virtual stages and recomputation are not stated, so every row is
predicted with six sets of them, and compared with the baseline of the same set. Memory is that of the fullest
rank: the paper's rematerialization keeps less than Myriad's, and sets that do not fit are not left out.
No constant is fitted.
"""

from itertools import product
from typing import Any

from myriad.comm.layout import Layout
from myriad.job import load_job
from myriad.planner import Costs, SimulationCache, Workload, scale_cluster
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

CUT = {"tp": 8}
SHARED = {"cp": 8, "ulysses": 8, "ep": 8}
OFF = OverlapConfig(tensor=None)
ROWS: tuple[tuple[str, dict[str, int], OverlapConfig, float], ...] = (
    ("1 experts cut by tp", CUT, OFF, 1.00),
    ("2 shared sequences, whole experts", SHARED, OFF, 1.13),
    ("3 turns", SHARED, OverlapConfig(tensor="turns"), 1.22),
    ("4 pairs", SHARED, OverlapConfig(tensor=None, pairs=True), 1.28),
)
OPEN = [
    {"virtual_stages": stages, "recompute": recompute, "schedule": schedule}
    for (stages, schedule), recompute in product(
        ((1, "eager-1f1b"), (2, "interleaved"), (4, "interleaved")), ("none", "selective")
    )
]
"""Values that the paper leaves open and that all rows can have."""
BATCH, GPUS, PUBLISHED_SECONDS = 720, 240, 21.61


def costs_of(keys: dict[str, int], values: dict[str, Any], overlap: OverlapConfig) -> Costs:
    """Return the costs of a row with some of the open values."""
    layout = Layout.model_validate({"pp": 15, "dp": 2, "zero": 1, "micro_batch": 1, **keys, **values})
    model = load_job("megascale-moe-352b").model
    cluster = scale_cluster(load_cluster("megascale-1440xh800"), GPUS)
    return Costs(Workload(model, layout, BATCH, overlap), cluster)


def spread(values: list[float], digits: int) -> str:
    """Return the smallest and the largest of some values."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def main() -> None:
    """Print a line for each row."""
    simulations, first = SimulationCache(), list[float]()
    print("| row | published | predicted | s | exposed: tensor, experts, sequences | GiB |")
    print("|---" * 6 + "|")
    for name, keys, overlap, published in ROWS:
        every = [costs_of(keys, values, overlap) for values in OPEN]
        seconds = [simulations.seconds(costs) for costs in every]
        first = first or seconds
        gains = [before / now for before, now in zip(first, seconds, strict=True)]
        best = seconds.index(min(seconds))
        parts = every[best].busiest_rank[0]
        shares = (float(one) / min(seconds) for one in (parts.tensor, parts.experts, parts.context))
        exposed = ", ".join(f"{share:.1%}" for share in shares)
        memory = [max(float(rank.total) for rank in simulations.memory(costs)) / 2**30 for costs in every]
        cells = [name, f"{published:.2f}", spread(gains, 2), spread(seconds, 2), exposed, spread(memory, 0)]
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nthe whole system, published: {PUBLISHED_SECONDS} s")


if __name__ == "__main__":
    main()
