"""Published iterations of mixtures of experts beside the planner's predictions.

    python benchmarks/planner/expert_rows.py

These rows are no table of `myriad validate`: too much of them is unknown. Their sources leave the
micro-batch, virtual stages and recomputation open, so each row is predicted with those that are the fastest
of those that fit, as for other tables, and no constant is fitted to them. Rows whose experts are whole on
one of several tensor-parallel ranks, or with context parallelism or float8, are left out.

Sources: Megatron-Core's parallel folding (arXiv 2504.14960, table 3: MFU; capacity factor 1), NVIDIA's
dgxc-benchmarking v25.02 (Grok-1 with fewer layers), and Megatron-LM as the baseline of MegaScale-MoE
(arXiv 2505.11432, table 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner import Costs, SimulationCache, Workload
from myriad.planner.validation.prediction_errors import probability_of_fit
from myriad.planner.validation.published_systems import MEGATRON_CORE
from myriad.recipes.cluster import load_cluster, scale_cluster

PEAK = 989.5e12
LLAMA: dict[str, Any] = {"activation": "swiglu", "tied": False, "sequence": 4096}
MIXTRAL = LLAMA | {
    "layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn_hidden": 16384, "vocabulary": 32000,
    "experts": 8,
}  # fmt: skip
FINE = MIXTRAL | {"experts": 64, "experts_per_token": 8, "expert_hidden": 2048}
QWEN2 = LLAMA | {
    "layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "vocabulary": 151936, "experts": 64,
    "experts_per_token": 8, "expert_hidden": 2560, "shared_experts": 8,
}  # fmt: skip
GROK = LLAMA | {
    "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn_hidden": 32768, "vocabulary": 131072, "experts": 8,
}  # fmt: skip
MEGASCALE = LLAMA | {
    "layers": 60, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocabulary": 65536,
    "sequence": 8192, "experts": 32, "experts_per_token": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published iteration: its seconds, or the MFU from which they follow."""

    name: str
    model: dict[str, Any]
    batch: int
    layout: dict[str, int]
    mfu: float | None = None
    seconds: float | None = None


ROWS = (
    Row("Mixtral 8x22B, FSDP + EP", MIXTRAL, 256, {"tp": 2, "dp": 64, "ep": 8, "zero": 3}, 0.234),
    Row("Mixtral 8x22B, TP + EP + DP", MIXTRAL, 256, {"tp": 4, "dp": 32, "ep": 8, "zero": 1}, 0.366),
    Row("Mixtral 8x22B, MCore", MIXTRAL, 256, {"tp": 2, "pp": 8, "dp": 8, "ep": 4, "zero": 1}, 0.463),
    Row("8x22B of 64 experts, FSDP + EP", FINE, 256, {"tp": 4, "dp": 32, "ep": 8, "zero": 3}, 0.090),
    Row("8x22B of 64 experts, TP + EP + DP", FINE, 256, {"tp": 8, "dp": 16, "ep": 8, "zero": 1}, 0.087),
    Row("8x22B of 64 experts, MCore", FINE, 256, {"tp": 2, "pp": 8, "dp": 8, "ep": 8, "zero": 1}, 0.171),
    Row("Qwen2-57B-A14B, FSDP + EP", QWEN2, 256, {"dp": 64, "ep": 8, "zero": 3}, 0.254),
    Row("Qwen2-57B-A14B, TP + EP + DP", QWEN2, 256, {"tp": 4, "dp": 16, "ep": 4, "zero": 1}, 0.231),
    Row("Qwen2-57B-A14B, MCore", QWEN2, 256, {"tp": 2, "pp": 4, "dp": 8, "ep": 4, "zero": 1}, 0.353),
    Row("Grok-1, 2 layers", GROK | {"layers": 2}, 1024, {"tp": 4, "dp": 2, "ep": 2, "zero": 1}, None, 24.0),
    Row("Grok-1, 4 layers", GROK | {"layers": 4}, 1024, {"tp": 4, "dp": 4, "ep": 4, "zero": 1}, None, 21.71),
    Row("Grok-1, 4 layers", GROK | {"layers": 4}, 1024, {"tp": 4, "dp": 8, "ep": 8, "zero": 1}, None, 10.7),
    Row("352B, Megatron-LM", MEGASCALE, 720, {"tp": 8, "pp": 15, "dp": 2, "zero": 1}, None, 39.035),
    Row("352B, Megatron-LM", MEGASCALE, 720, {"tp": 8, "pp": 15, "dp": 12, "zero": 1}, None, 7.9),
)


def works_of(row: Row) -> Iterator[Workload]:
    """Yield the workloads that the row may have been, of micro-batches up to 4."""
    model, given = ModelConfig(**row.model), Layout(**row.layout)
    for micro_batch in (1, 2, 4):
        if row.batch % (given.dp * micro_batch):
            continue
        most = model.layers // given.pp if given.pp > 1 else 1
        for stages in [number for number in range(1, most + 1) if model.layers % (given.pp * number) == 0]:
            for recompute in ("none", "selective", "full"):
                changes = {"micro_batch": micro_batch, "virtual_stages": stages, "recompute": recompute}
                layout = given.model_copy(update=changes)
                yield Workload(model, layout, row.batch, MEGATRON_CORE.overlap, MEGATRON_CORE.profile)


def main() -> None:
    """Print a line for each row."""
    simulations = SimulationCache()
    print("| row | GPUs | tp pp dp ep | published s | predicted s | error | MFU | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        layout = Layout(**row.layout)
        cluster, works = scale_cluster(load_cluster("eos-3072xh100"), layout.world), list(works_of(row))
        works = [one for one in works if probability_of_fit(one, cluster) > 0.5] or works
        found = min(simulations.seconds(Costs(one, cluster)) for one in works)
        second_at_peak = works[0].model_flops / (layout.world * PEAK)
        published = row.seconds or second_at_peak / (row.mfu or 1.0)
        cells = [row.name, str(layout.world), f"{layout.tp} {layout.pp} {layout.dp} {layout.ep}"]
        cells += [f"{published:.2f}", f"{found:.2f}", f"{found / published - 1:+.0%}"]
        cells += [f"{second_at_peak / seconds:.1%}" for seconds in (published, found)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
