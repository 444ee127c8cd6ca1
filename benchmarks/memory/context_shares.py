"""Shares of a sequence: how equal the work of the ranks of `layout.cp` is, what they send each other, and how
many bytes of activations each keeps.

    python benchmarks/memory/context_shares.py [--sequence 131072] [--windows 8] [--only whole]

balance    pairs of a query and a key that a rank computes: the busiest rank's over the mean, and the spread
           (most - fewest) / most. Documents are modules of Python's standard library in a shuffled order,
           four bytes to a token, cut where a window ends.
sent       positions that the busiest rank receives in a forward, of those that the whole ring carries to it
whole      the same with `layout.whole_documents`, and the share of positions in documents that are still cut;
           documents of lognormal lengths beside the modules
bytes      of one layer and micro-batch, as in `activations.py`: measured on real ranks, and by the formula
"""

import argparse
import math
import random
import sys
import sysconfig
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import torch

from activations import BATCH, DTYPES, MODEL, formula, measure
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels.document_shares import DocumentSharing, document_parts
from myriad.kernels.documents import Documents
from myriad.kernels.ring_plan import ring_plan
from myriad.model.config import ModelConfig
from myriad.parallel.tensor_parallel import make_boundary
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from ranks import run_ranks

SIZES = (1, 2, 4, 8)
BLOCK = MODEL.model_copy(update={"kv_heads": 2, "activation": "swiglu"})
LAYERS: dict[str, tuple[ModelConfig, int]] = {
    "block": (BLOCK, 1),
    "block, window of 64": (BLOCK.model_copy(update={"window": 64}), 1),
    "head": (BLOCK, 3),
}


def documents(sequence: int, num_windows: int) -> list[Documents]:
    """Windows of real documents, a value for each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    lengths = [max(1, path.stat().st_size // 4) for path in sorted(folder.glob("[a-z]*/*.py"))]
    random.Random(1).shuffle(lengths)
    borders, total = {0}, 0
    for length in lengths:
        total += length
        borders.add(total)
    found = []
    for start in range(0, min(total, num_windows * sequence) - sequence + 1, sequence):
        inside = sorted(
            {start, start + sequence} | {one for one in borders if start < one < start + sequence}
        )
        found.append(Documents(torch.empty(0), [[b - a for a, b in pairwise(inside)]]))
    return found


def balance(sequence: int, window: int | None, size: int, inside: Documents | None) -> tuple[float, float]:
    """How far the pairs of the busiest rank of a ring are above the mean, and their spread."""
    pairs = [ring_plan(sequence, window, rank, size, inside).num_pairs(1) for rank in range(size)]
    return max(pairs) * size / sum(pairs) - 1, (max(pairs) - min(pairs)) / max(pairs)


def sent(sequence: int, window: int | None, size: int, inside: Documents | None) -> float:
    """Positions that arrive at the busiest rank, of those of a whole ring."""
    plans = [ring_plan(sequence, window, rank, size, inside) for rank in range(size)]
    whole = (size - 1) * sequence // size
    return max(whole if plan.sent is None else sum(plan.received) for plan in plans) / whole


def print_balance(sequence: int, num_windows: int) -> None:
    packed = documents(sequence, num_windows)
    number = sum(len(one.lengths[0]) for one in packed)
    print(f"{len(packed)} windows of {sequence} positions with {number} documents\n")
    print("| ranks | window | above the mean | spread | sent | documents: above the mean | spread | sent |")
    print("|---|---|---|---|---|---|---|---|")
    for size in (2, 4, 8, 16):
        for window in (None, 16384, 4096, 512):
            above, spread = balance(sequence, window, size, None)
            own = [Documents(one.positions, one.lengths, DocumentSharing(window)) for one in packed]
            found = [balance(sequence, window, size, one) for one in own]
            means = [sum(ones) / len(packed) for ones in zip(*found, strict=True)]
            plain = sent(sequence, window, size, None)
            moved = sum(sent(sequence, window, size, one) for one in own) / len(packed)
            cells = (
                f"{above:.2%} | {spread:.2%} | {plain:.1%} | {means[0]:.2%} | {means[1]:.2%} | {moved:.1%}"
            )
            print(f"| {size} | {window or 'none'} | {cells} |")


def drawn_documents(sequence: int, num_windows: int, median: float, sigma: float) -> list[Documents]:
    """Windows of documents whose lengths are drawn from a lognormal distribution."""
    draw, found = random.Random(1), []
    for _ in range(num_windows):
        lengths: list[int] = []
        while (left := sequence - sum(lengths)) > 0:
            lengths.append(min(left, int(draw.lognormvariate(math.log(median), sigma)) + 1))
        found.append(Documents(torch.empty(0), [lengths]))
    return found


def print_whole(sequence: int, num_windows: int) -> None:
    kinds = {
        "modules": documents(sequence, num_windows),
        "web pages: median 500, sigma 1.2": drawn_documents(sequence, num_windows, 500, 1.2),
        "chats: median 300, sigma 0.7": drawn_documents(sequence, num_windows, 300, 0.7),
    }
    print(f"\nwhole documents, {num_windows} windows of {sequence} positions\n")
    print("| documents | ranks | cut: sent | whole: above the mean | at most | sent | still cut |")
    print("|---|---|---|---|---|---|---|")
    for (kind, packed), size in product(kinds.items(), (2, 4, 8)):
        own = [Documents(one.positions, one.lengths, DocumentSharing(whole=True)) for one in packed]
        above = [balance(sequence, None, size, one)[0] for one in own]
        before, after = (
            sum(sent(sequence, None, size, one) for one in ones) / len(ones) for ones in (packed, own)
        )
        parts = [document_parts(one.lengths[0], size, one.sharing) for one in own]
        cut = sum(
            length
            for one, ranks in zip(own, parts, strict=True)
            for length, holders in zip(one.lengths[0], zip(*ranks, strict=True), strict=True)
            if sum(map(bool, holders)) > 1
        )
        cells = f"{before:.0%} | {sum(above) / len(own):.1%} | {max(above):.1%} | {after:.0%}"
        print(f"| {kind} | {size} | {cells} | {cut / sequence / len(own):.0%} |")


def kept_on_rank(size: int) -> list[int]:
    """One rank's side: bytes of each layer and type."""
    groups = open_world(Layout(cp=size), torch.device("cpu"))
    boundary = make_boundary(groups, OverlapConfig(), Recorder(), "auto", torch.device("cpu"))
    found = [
        measure(model, index, boundary, dtype, "none") for model, index in LAYERS.values() for dtype in DTYPES
    ]
    close_world()
    return found


def on_ranks(size: int) -> list[int]:
    """Rank 0's, on forked processes."""
    return run_ranks(size, kept_on_rank, size)[0]


def print_bytes(kept: Sequence[Sequence[int]]) -> None:
    print(
        f"\n{BLOCK.sequence} positions, {BATCH} sequences in a micro-batch; bytes a rank, x ranks / first\n"
    )
    print("| layer | type | " + " | ".join(f"cp {size}" for size in SIZES) + " | formula |")
    print("|---|---|" + "---|" * (len(SIZES) + 1))
    for row, ((name, (model, index)), dtype) in enumerate(
        (layer, dtype) for layer in LAYERS.items() for dtype in DTYPES
    ):
        own = [one[row] for one in kept]
        equal = all(
            bytes_ == formula(model, index, 1, dtype, "none", context=(size, 1))
            for bytes_, size in zip(own, SIZES, strict=True)
        )
        cells = [f"{one:,} ({one * size / own[0]:.3f})" for one, size in zip(own, SIZES, strict=True)]
        kind = str(dtype).removeprefix("torch.")
        print(f"| {name} | {kind} | " + " | ".join(cells) + f" | {'yes' if equal else 'NO'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares of a sequence: balance, messages, activations.")
    parser.add_argument("--sequence", type=int, default=131072)
    parser.add_argument("--windows", type=int, default=8, help="windows of documents")
    parser.add_argument("--only", choices=["whole"], help="print only this table")
    options = parser.parse_args()
    print_whole(options.sequence, options.windows)
    if options.only:
        return
    print_balance(options.sequence, options.windows)
    print_bytes([on_ranks(size) for size in SIZES])


if __name__ == "__main__":
    main()
