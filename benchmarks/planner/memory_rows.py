"""Peak memory of published layouts as the planner predicts it, beside what was measured.

    python benchmarks/planner/memory_rows.py [--chart FILE.svg] [--without-profile]
    python benchmarks/planner/memory_rows.py --fits
    python benchmarks/planner/memory_rows.py --sweep bench_final2_mfu2.csv

The first prints the rows that come with Myriad: nanotron's sweep, zero-bubble's and SimuMax's tables. The
second asks of all published iterations whether their layouts are predicted to fit, since they ran. The third
reads nanotron's whole sweep as it is published (Hugging Face, nanotron/ultrascale-playbook-data; also
gkarfakis19/Rapid-LLM, validation_scripts/huggingface_data), with the layouts that ran out of memory.

Values of nanotron's profile were fitted to models of 1.34 billion parameters; all other sizes are held back.
"""

import argparse
import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from myriad.planner import (
    PredictedMemory,
    TableOptions,
    memory_errors,
    parse_table,
    predict_table,
    read_table,
)
from myriad.planner.memory.framework_memory import FrameworkMemory
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.memory_errors import MemoryErrors, predict_memory_of
from myriad.planner.validation.published_rows import PublishedRow
from myriad.recipes.framework import ReadyRecipes
from rehearsal_chart import Dot, dots_svg

_FITTED = 2048
"""Width of the models that values were fitted to."""


def shipped_rows() -> list[PublishedRow]:
    """Return the rows with memory that come with Myriad; of nanotron only the sweep."""
    recipes = ReadyRecipes()
    sweep = read_table("nanotron_sweep.csv", recipes).rows
    others = read_table("iterations.csv", recipes, TableOptions(skip_bad=True)).rows
    return [*sweep, *(row for row in others if row.memory is not None and row.framework != "nanotron")]


def timed_rows() -> Iterator[PredictedMemory]:
    """Yield the rows with a time; what a row leaves open is as in its predicted time."""
    recipes, simulations = ReadyRecipes(), SimulationCache()
    for name in ("iterations.csv", "grace_blackwell.csv"):
        for one in predict_table(read_table(name, recipes, TableOptions(skip_bad=True))).rows:
            yield predict_memory_of(one.row, one.workload, simulations)


# Nanotron's whole sweep

_NAME = re.compile(r"_dp(\d+)_tp(\d+)_pp(\d+)_acc(\d+)_mbs(\d+)_seq(\d+)_zero(\d)_")
_WIDTHS = {
    2048: (8192, 1.34),
    3072: (8192, 3.57),
    4096: (14336, 8.86),
    8192: (28672, 79.7),
    16384: (53248, 469.0),
}
"""Inner width and billions of parameters of each model, by its width."""
_COLUMNS = (
    "framework", "model", "params_B", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq",
    "global_batch", "gpus", "gpu_type", "tp", "pp", "dp", "vpp", "zero", "micro_batch", "recompute", "dtype",
    "tokens_per_s_per_gpu", "allocated_bytes", "reserved_bytes", "out_of_memory",
)  # fmt: skip


def sweep_rows(path: Path) -> list[PublishedRow]:
    """Return the rows of nanotron's file that ran or ran out of memory."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    with path.open(newline="") as file:
        writer.writerows(cells for line in csv.DictReader(file) for cells in _cells(line))
    table = parse_table(str(path), text.getvalue(), ReadyRecipes(), TableOptions(skip_bad=True))
    return [*table.rows, *table.memory_rows]


def _cells(line: dict[str, str]) -> Iterator[dict[str, object]]:
    found = _NAME.search(line["name"])
    if found is None or line["status"] not in ("Success", "OOM"):
        return
    dp, tp, pp, accumulated, micro_batch, sequence, zero = map(int, found.groups())
    hidden, ran = int(line["hidden_size"]), line["status"] == "Success"
    width, billions = _WIDTHS[hidden]
    yield {
        "framework": "nanotron", "model": f"llama-like-{billions:g}G", "params_B": billions,
        "layers": line["num_layers"], "hidden": hidden, "ffn": width, "heads": line["num_heads"],
        "kv_heads": int(float(line["num_kv_heads"] or line["num_heads"])), "vocab": 131072, "seq": sequence,
        "global_batch": dp * accumulated * micro_batch, "gpus": dp * tp * pp, "gpu_type": "H100-SXM-80GB",
        "tp": tp, "pp": pp, "dp": dp, "vpp": 1, "zero": zero, "micro_batch": micro_batch,
        "recompute": "none", "dtype": "bf16",
        "tokens_per_s_per_gpu": line["tok/s/gpu"] if ran else "",
        "allocated_bytes": f"{line['Mem Alloc (GB)']} GiB" if ran else "",
        "reserved_bytes": f"{line['Mem Res (GB)']} GiB" if ran else "", "out_of_memory": "" if ran else "yes",
    }  # fmt: skip


# Figures


def predicted(rows: Sequence[PublishedRow], *, with_profile: bool = True) -> list[PredictedMemory]:
    """Predict the rows, each as the first of its possible workloads. ``with_profile``: off: with Myriad's
    memory, on the rank and for the moment that the framework reports."""
    simulations, found = SimulationCache(), []
    for row in rows:
        work, memory = row.works[0], row.works[0].profile.memory
        if not with_profile:
            memory = FrameworkMemory(reports=memory.reports, reported_rank=memory.reported_rank)
        work = replace(work, profile=replace(work.profile, memory=memory))
        found.append(predict_memory_of(row, work, simulations))
    return found


def _group(one: PredictedMemory) -> str:
    if one.row.framework != "nanotron":
        return one.row.framework
    size = one.row.name.split()[0].removeprefix("llama-like-")
    fitted = one.workload.model.hidden == _FITTED
    return f"nanotron {size}, " + ("fitted" if fitted else "held back")


def _line(name: str, one: MemoryErrors) -> list[str]:
    ran_out = one.num_out_of_memory
    ran = len(one.rows) - ran_out
    right = [
        sum(row.fits_as_measured for row in one.rows if row.measured.ran_out == out) for out in (False, True)
    ]
    return [
        name,
        str(ran),
        _ratio(one.allocated_median),
        _ratio(one.reserved_median),
        _ratio(right[0] / ran if ran else None),
        str(ran_out) if ran_out else "",
        _ratio(right[1] / ran_out if ran_out else None),
        _ratio(one.fits_right_ratio),
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _print(found: Sequence[PredictedMemory]) -> None:
    groups: dict[str, list[PredictedMemory]] = defaultdict(list)
    for one in found:
        groups[_group(one)].append(one)
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("rows of", no_wrap=True)
    for name in ("ran", "allocated", "reserved", "fit", "ran out", "do not fit", "right"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, rows in groups.items():
        grid.add_row(*_line(name, MemoryErrors(name, tuple(rows))))
    for one in memory_errors(found):
        grid.add_row(*_line(f"all: {one.framework}", one))
    Console(width=110).print(grid)
    print(
        "allocated, reserved: median errors. fit, do not fit, right: shares of rows of which that is right."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sweep", type=Path, metavar="FILE.csv", help="nanotron's file instead of shipped rows"
    )
    parser.add_argument(
        "--chart", type=Path, metavar="FILE.svg", help="draw predicted against measured bytes"
    )
    parser.add_argument("--fits", action="store_true", help="all rows with a time: do they fit?")
    parser.add_argument("--without-profile", action="store_true", help="predict with Myriad's values")
    given = parser.parse_args()
    if given.fits:
        found = list(timed_rows())
    else:
        rows = sweep_rows(given.sweep) if given.sweep else shipped_rows()
        found = predicted(rows, with_profile=not given.without_profile)
    _print(found)
    for one in found if given.fits else ():
        if not one.fits:
            print(f"{one.needed_bytes / 2**30:.1f} GiB predicted: {one.row.framework}, {one.row.name}")
    if given.chart:
        given.chart.write_text(dots_svg("Peak memory, allocated or reserved", "GiB", list(_dots(found))))


def _dots(found: Sequence[PredictedMemory]) -> Iterator[Dot]:
    """Yield a dot for each row: reserved bytes of the sweep, allocated bytes of other tables."""
    for one in found:
        group, ours, truth = one.row.framework, one.allocated_bytes, one.measured.allocated_bytes
        if one.measured.reserved_bytes is not None:
            group, ours, truth = f"{group}, reserved", one.reserved_bytes, one.measured.reserved_bytes
        if truth is not None:
            yield Dot(one.row.name, group, truth / 2**30, ours / 2**30)


if __name__ == "__main__":
    main()
