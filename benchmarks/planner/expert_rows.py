"""Published iterations of mixtures of experts beside the planner's predictions.

    python benchmarks/planner/expert_rows.py

These rows are no table of `myriad validate`: too much of them is unknown. Where a source leaves micro-batch,
virtual stages or recomputation open, the row is predicted with those that are the fastest of those that fit,
as for other tables; beside it stands the slowest of those that fit. No constant is fitted to a row. Rows with
context parallelism or float8 are left out.

Sources: Megatron-Core's parallel folding (arXiv 2504.14960, table 3: MFU; capacity factor 1), NVIDIA's
dgxc-benchmarking v25.02 (Grok-1 with fewer layers; micro-batch 1, no recomputation), the
Megatron-MoE-ModelZoo at e865051 (Qwen3-235B: all is stated), and Megatron-LM as the baseline of MegaScale-MoE
(arXiv 2505.11432, table 3).

Five facts of these systems differ from Myriad. Megatron-Core's pipeline stages are the outermost axis of its
grid (tp-cp-ep-dp-pp), so that the ranks that share experts are neighbours (`FrameworkProfile.pp_outermost`).
Its tensor-parallel ranks send the tokens of their part of the sequence and gather what arrives
(`gathers_arrived`), and one kernel multiplies the tokens of all experts of a rank (`grouped_experts`). Its
FSDP gathers a layer at a time in each forward and backward and reduces its gradients after each backward,
which is ZeRO 3 with a stage for each layer. DeepEP (three of Qwen3's rows) sends a token once to each node.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
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
QWEN3 = LLAMA | {
    "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_dim": 128, "vocabulary": 151936,
    "experts": 128, "experts_per_token": 8, "expert_hidden": 1536, "qk_norm": "head",
}  # fmt: skip
GROK = LLAMA | {
    "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn_hidden": 32768, "vocabulary": 131072, "experts": 8,
}  # fmt: skip
MEGASCALE = LLAMA | {
    "layers": 60, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocabulary": 65536,
    "sequence": 8192, "experts": 32, "experts_per_token": 3, "shared_experts": 1,
}  # fmt: skip


STATED = {"micro_batch": 1, "virtual_stages": 1, "recompute": "none"}
EOS, H800 = "eos-3072xh100", "deepseek-2048xh800"


@dataclass(frozen=True)
class Row:
    """A published iteration: its seconds, or the MFU from which they follow."""

    name: str
    model: dict[str, Any]
    batch: int
    layout: dict[str, Any]
    """With micro-batch, virtual stages and recomputation, as far as they are stated."""
    mfu: float | None = None
    seconds: float | None = None
    cluster: str = EOS


ROWS = (
    Row("Mixtral 8x22B, FSDP + EP", MIXTRAL, 256, {"tp": 2, "dp": 64, "ep": 8, "zero": 3}, 0.234),
    Row("Mixtral 8x22B, TP + EP + DP", MIXTRAL, 256, {"tp": 4, "dp": 32, "ep": 8, "zero": 1}, 0.366),
    Row("Mixtral 8x22B, MCore", MIXTRAL, 256, {"tp": 2, "pp": 8, "dp": 8, "ep": 4, "zero": 1}, 0.463),
    Row("Mixtral 8x22B, folding", MIXTRAL, 256,
        {"tp": 2, "pp": 8, "dp": 8, "ep": 8, "etp": 1, "zero": 1}, 0.493),
    Row("8x22B of 64 experts, FSDP + EP", FINE, 256, {"tp": 4, "dp": 32, "ep": 8, "zero": 3}, 0.090),
    Row("8x22B of 64 experts, TP + EP + DP", FINE, 256, {"tp": 8, "dp": 16, "ep": 8, "zero": 1}, 0.087),
    Row("8x22B of 64 experts, MCore", FINE, 256, {"tp": 2, "pp": 8, "dp": 8, "ep": 8, "zero": 1}, 0.171),
    Row("8x22B of 64 experts, folding", FINE, 256,
        {"tp": 4, "pp": 8, "dp": 4, "ep": 8, "etp": 1, "zero": 1}, 0.288),
    Row("Qwen2-57B-A14B, FSDP + EP", QWEN2, 256, {"dp": 64, "ep": 8, "zero": 3}, 0.254),
    Row("Qwen2-57B-A14B, TP + EP + DP", QWEN2, 256, {"tp": 4, "dp": 16, "ep": 4, "zero": 1}, 0.231),
    Row("Qwen2-57B-A14B, MCore", QWEN2, 256, {"tp": 2, "pp": 4, "dp": 8, "ep": 4, "zero": 1}, 0.353),
    Row("Qwen2-57B-A14B, folding", QWEN2, 256,
        {"tp": 2, "pp": 4, "dp": 8, "ep": 4, "etp": 1, "zero": 1}, 0.390),
    Row("Qwen3-235B, all-to-all", QWEN3, 2048,
        {"tp": 2, "pp": 32, "dp": 4, "ep": 8, "etp": 1, "zero": 1, "micro_batch": 1, "virtual_stages": 3,
         "recompute": "selective"}, None, 24.2),
    Row("Qwen3-235B, DeepEP in a node", QWEN3, 2048,
        {"tp": 4, "pp": 8, "dp": 8, "ep": 8, "etp": 1, "expert_dispatch": "node", "zero": 1, "micro_batch": 1,
         "virtual_stages": 4, "recompute": "none"}, None, 29.0),
    Row("Qwen3-235B, DeepEP", QWEN3, 2048,
        {"tp": 2, "pp": 8, "dp": 16, "ep": 32, "etp": 1, "expert_dispatch": "node", "zero": 1,
         "micro_batch": 1, "virtual_stages": 4, "recompute": "selective"}, None, 19.7),
    Row("Qwen3-235B, DeepEP and FSDP", QWEN3, 2048,
        {"tp": 2, "dp": 128, "ep": 8, "etp": 1, "expert_dispatch": "node", "zero": 3, "micro_batch": 4,
         "recompute": "full"}, None, 17.6),
    Row("Grok-1, 2 layers", GROK | {"layers": 2}, 1024,
        {"tp": 4, "dp": 2, "ep": 2, "zero": 1, **STATED}, None, 24.0),
    Row("Grok-1, 4 layers", GROK | {"layers": 4}, 1024,
        {"tp": 4, "dp": 4, "ep": 4, "zero": 1, **STATED}, None, 21.71),
    Row("Grok-1, 4 layers", GROK | {"layers": 4}, 1024,
        {"tp": 4, "dp": 8, "ep": 8, "zero": 1, **STATED}, None, 10.7),
    Row("352B, Megatron-LM", MEGASCALE, 720, {"tp": 8, "pp": 15, "dp": 2, "zero": 1}, None, 39.035, H800),
    Row("352B, Megatron-LM", MEGASCALE, 720, {"tp": 8, "pp": 15, "dp": 12, "zero": 1}, None, 7.9, H800),
)  # fmt: skip
PROFILE = replace(MEGATRON_CORE.profile, gathers_arrived=True, grouped_experts=True, pp_outermost=True)


def open_values(row: Row, model: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield the values that the row's source leaves open, of micro-batches up to 4."""
    given = Layout(**row.layout)
    stages = [number for number in range(1, model.layers + 1) if model.layers % (given.pp * number) == 0]
    if given.pp == 1:
        stages = [model.layers] if given.zero == 3 else [1]
    values = {"micro_batch": (1, 2, 4), "virtual_stages": stages, "recompute": ("none", "selective", "full")}
    left = {key: every for key, every in values.items() if key not in row.layout}
    for found in product(*left.values()):
        yield dict(zip(left, found, strict=True)) | ({"reduce": "each"} if given.zero == 3 else {})


def works_of(row: Row) -> Iterator[Workload]:
    """Yield the workloads that the row may have been."""
    model = ModelConfig(**row.model)
    for values in open_values(row, model):
        layout = Layout(**(row.layout | values))
        if row.batch % (layout.dp * layout.micro_batch) == 0:
            yield Workload(model, layout, row.batch, MEGATRON_CORE.overlap, PROFILE)


def main() -> None:
    """Print a line for each row."""
    simulations = SimulationCache()
    print("| row | GPUs | tp pp dp ep etp | published s | predicted s | error | slowest | MFU | predicted |")
    print("|---" * 9 + "|")
    for row in ROWS:
        layout = Layout(**row.layout)
        cluster, works = scale_cluster(load_cluster(row.cluster), layout.world), list(works_of(row))
        works = [one for one in works if probability_of_fit(one, cluster) > 0.5] or works
        found = [simulations.seconds(Costs(one, cluster)) for one in works]
        second_at_peak = works[0].model_flops / (layout.world * PEAK)
        published = row.seconds or second_at_peak / (row.mfu or 1.0)
        degrees = f"{layout.tp} {layout.pp} {layout.dp} {layout.ep} {layout.expert_tp}"
        cells = [row.name, str(layout.world), degrees, f"{published:.2f}", f"{min(found):.2f}"]
        cells.append(f"{min(found) / published - 1:+.0%}")
        cells.append(f"{max(found) / published - 1:+.0%}" if len(found) > 1 else "")
        cells += [f"{second_at_peak / seconds:.1%}" for seconds in (published, min(found))]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
