"""MegaScale's table 3 on shaped links: what each technique adds, one row after the other.

    python benchmarks/links/ablation.py [--repeats 3] [--steps 3] [--svg FILE] [--json] [--quick]
    python benchmarks/links/ablation.py --experts [--rate 200mbit] [--repeats 3] [--quick]

Every row keeps what the rows above it switched on (MegaScale, arXiv 2402.15627, table 3: 175B parameters on
256 A100; its MFU stands beside ours for order and shape, not for size). All rows train the same small GPT on
real text in float32, in four layouts, each with the rows that can change something there:

    dp2 pp2    four hosts, two ranks on each of two cores: the whole list but the tensor-parallel rows
    tp2        two hosts, a core each: what tensor parallelism feels
    pp2, dp2   the same for the pipeline and for data parallelism

Two or more ranks on a core hide waiting by themselves: while one waits the other computes. So `dp2 pp2`
understates what overlap gives, and the columns of two ranks say what each technique gives alone.

A row's time is for the same number of tokens in every row, though a step with LAMB has 3 x as many. MFU:
model FLOPs with attended pairs only, over a float32 matrix product on all cores at once (`peak`). Visits to
rows are interleaved: medians over repeats, with the smallest and the largest.

``--experts``: the rows of MegaScale-MoE instead (`expert_ablation_links`).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ablation_chart import Bar, bars_svg
from myriad.data.corpus_cache import prepare_embedded
from myriad.job import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from expert_ablation_links import MoeWork, expert_table, measure_experts
from gpt_ranks import Setup, make_job, peak_flops, train
from hosts import Hosts
from plain_operators import plain_operators

VOCABULARY = 1024
LARGER_BATCH = 3


@dataclass(frozen=True)
class Row:
    """What one line of the table switches on."""

    name: str
    paper_mfu: float | None
    """Off: the paper has no such row."""
    keys: Mapping[str, object] = field(default_factory=dict)


BASELINE, BLOCK, WINDOW, SLICES, TURNS, PIPELINE, DATA, OPERATORS, LOADER, LAMB = range(10)
ROWS = (
    Row(
        "baseline: serial block, full attention, nothing overlaps, AdamW",
        47.7,
        {
            "model.layers": 6,
            "model.hidden": 256,
            "model.sequence": 256,
            "model.vocabulary": VOCABULARY,
            "data.vocabulary": VOCABULARY,
            "train.global_batch": 8,
            "overlap.pipeline": False,
            "overlap.data": False,
            "overlap.tensor": False,
            "overlap.optimizer": False,
        },
    ),
    Row("+ parallel block", 52.3, {"model.block": "parallel"}),
    Row("+ sliding window", 53.3, {"model.window": 64}),
    Row("+ tensor overlap in slices", 55.5, {"overlap.tensor": "slices"}),
    Row("or in turns instead", None, {"overlap.tensor": "turns"}),
    Row("+ pipeline overlap", 58.0, {"overlap.pipeline": True}),
    Row("+ data overlap (and optimizer)", 59.5, {"overlap.data": True, "overlap.optimizer": True}),
    Row("+ operators (PyTorch's above)", 61.2),
    Row("+ data pipeline (loader ahead)", 62.3),
    Row("+ LAMB, 3 x the batch", 65.3, {"optimizer.name": "lamb"}),
)


@dataclass(frozen=True)
class Column:
    """One layout, and which rows are measured in it."""

    name: str
    keys: Mapping[str, object]
    rows: tuple[int, ...]
    rate: str
    plain_first: bool = False
    """PyTorch's operators until the row that brings Myriad's; off: Myriad's throughout."""


def columns_of(rate: str, tensor_rate: str) -> tuple[Column, ...]:
    """Tensor parallelism sends far more, and is never spread over links as slow as the others can bear."""
    both = {"layout.dp": 2, "layout.zero": 2, "layout.pp": 2, "layout.virtual_stages": 2}
    pipeline = {key: both[key] for key in ("layout.pp", "layout.virtual_stages")}
    data = {key: both[key] for key in ("layout.dp", "layout.zero")} | {"layout.micro_batch": 2}
    all_but_tensor = tuple(row for row in range(len(ROWS)) if row not in (SLICES, TURNS))
    return (
        Column("dp2 pp2", both, all_but_tensor, rate, plain_first=True),
        Column("tp2", {"layout.tp": 2, "layout.micro_batch": 8}, tuple(range(TURNS + 1)), tensor_rate),
        Column("pp2", pipeline, (WINDOW, PIPELINE, LAMB), rate),
        Column("dp2", data, (WINDOW, DATA, LOADER, LAMB), rate),
    )


def job_of(column: Column, row: int) -> Job:
    """Everything that the rows up to this one have switched on."""
    keys: dict[str, object] = dict(column.keys)
    for above in ROWS[: row + 1]:
        keys |= above.keys
    if row >= LAMB:
        keys["train.global_batch"] = LARGER_BATCH * int(str(keys["train.global_batch"]))
    return make_job(keys)


def setup_of(column: Column, row: int) -> Setup:
    """What no key of a job says."""
    ahead = row >= LOADER
    if column.plain_first and row < OPERATORS:
        return Setup(loader_ahead=ahead, around=plain_operators)
    return Setup(loader_ahead=ahead)


@dataclass
class Cell:
    """What one row came to in one column."""

    column: str
    row: int
    tokens: int
    """Tokens of one step of the rows above LAMB."""
    flops: float
    """Model FLOPs of so many tokens."""
    seconds: list[float] = field(default_factory=list)
    """For so many tokens, of each repeat."""
    loss: float = 0.0
    """Loss of the last step."""
    mfu: float = 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


def new_cell(column: Column, row: int) -> Cell:
    tokens = int(str(ROWS[0].keys["train.global_batch"])) * int(str(ROWS[0].keys["model.sequence"]))
    return Cell(column.name, row, tokens, job_of(column, row).model.flops_per_token() * tokens)


def visit(hosts: Hosts, column: Column, cell: Cell, steps: int) -> None:
    """One more repeat."""
    job = job_of(column, cell.row)
    larger = job.train.global_batch * job.model.sequence // cell.tokens
    hosts.set_rate(column.rate)
    first = train(hosts, job, max(1, steps // larger), setup_of(column, cell.row))[0]
    cell.seconds.append(statistics.median(first.step_seconds) / larger)
    cell.loss = first.losses[-1]


def measure(columns: Sequence[Column], repeats: int, steps: int) -> tuple[list[Cell], float]:
    """Every cell, and the peak: the best of all repeats."""
    cells = [(column, new_cell(column, row)) for column in columns for row in column.rows]
    peaks = []
    with Hosts(4) as hosts:
        for repeat in range(repeats):
            peaks.append(peak_flops(hosts))
            for number, (column, cell) in enumerate(cells, 1):
                visit(hosts, column, cell, steps)
                _tell(f"repeat {repeat + 1} of {repeats}: {number} of {len(cells)}")
    _tell("")
    found = [cell for _, cell in cells]
    for cell in found:
        cell.mfu = cell.flops / cell.median_seconds / max(peaks)
    return found, max(peaks)


def _tell(words: str) -> None:
    """To a person who waits."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def table(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    """Milliseconds (smallest to largest) and MFU of every cell."""
    by_place = {(cell.column, cell.row): cell for cell in cells}
    heads = ["row", *(f"{column.name}, {column.rate}: ms | MFU %" for column in columns)]
    lines = [f"| {' | '.join(heads)} | paper: MFU % |", "|---" * (2 * len(columns) + 2) + "|"]
    for number, row in enumerate(ROWS):
        words = [row.name]
        for column in columns:
            cell = by_place.get((column.name, number))
            words += ["", ""] if cell is None else [_times(cell), f"{100 * cell.mfu:.1f}"]
        lines.append(f"| {' | '.join(words)} | {row.paper_mfu or ''} |")
    return "\n".join(lines)


def _times(cell: Cell) -> str:
    low, middle, high = (1e3 * x for x in (min(cell.seconds), cell.median_seconds, max(cell.seconds)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def loss_differences(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    """Rows from the window to LAMB train the same model on the same text: what they lose must agree."""
    found = []
    for column in columns:
        losses = [cell.loss for cell in cells if cell.column == column.name and WINDOW <= cell.row < LAMB]
        found.append(f"{column.name} {(max(losses) - min(losses)) / min(losses):.0e}")
    return "losses of the rows from the window to LAMB differ by at most: " + ", ".join(found)


def chart(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    """MFU of every cell as a bar, the paper's beside it."""
    groups = {}
    for column in columns:
        own = [cell for cell in cells if cell.column == column.name]
        groups[f"{column.name}, links of {column.rate}"] = [
            Bar(
                ROWS[cell.row].name.partition(":")[0],
                100 * cell.mfu,
                100 * cell.mfu * cell.median_seconds / max(cell.seconds),
                100 * cell.mfu * cell.median_seconds / min(cell.seconds),
                ROWS[cell.row].paper_mfu if column is columns[0] else None,
            )
            for cell in own
        ]
    return bars_svg("MFU, one technique after the other", groups, "paper, 256 A100")


def main() -> None:
    parser = argparse.ArgumentParser(description="What each technique adds on shaped links, row by row.")
    parser.add_argument("--rate", default="200mbit", help="of the links of pipeline and data parallelism")
    parser.add_argument("--tensor-rate", default="1gbit", help="of the links of tensor parallelism")
    parser.add_argument("--repeats", type=int, default=3, help="visits to each row")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a visit (LAMB: a third)")
    parser.add_argument("--columns", nargs="+", help="only these layouts, as dp2")
    parser.add_argument("--svg", type=Path, help="where to draw the chart")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="one repeat of one step")
    parser.add_argument("--experts", action="store_true", help="the rows of a mixture of experts instead")
    options = parser.parse_args()
    repeats, steps = (1, 1) if options.quick else (options.repeats, options.steps)
    if options.experts:
        work = MoeWork()
        print(expert_table(options.rate, work, measure_experts(options.rate, work, repeats, steps)))
        return
    columns = columns_of(options.rate, options.tensor_rate)
    columns = tuple(c for c in columns if options.columns is None or c.name in options.columns)
    prepare_embedded(vocabulary=VOCABULARY)
    cells, peak = measure(columns, repeats, steps)
    if options.svg:
        options.svg.write_text(chart(columns, cells))
    if options.json:
        named = [asdict(cell) | {"name": ROWS[cell.row].name} for cell in cells]
        print(json.dumps({"peak_flops": peak, "cells": named}))
        return
    print(table(columns, cells))
    print(
        f"\n{cells[0].tokens} tokens a row; peak {peak / 1e9:.0f} GFLOP/s: float32 product, all cores at once"
    )
    print(loss_differences(columns, cells))


if __name__ == "__main__":
    main()
