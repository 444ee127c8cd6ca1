"""Greedy generation of `myriad eval`, one document at a time against batches of documents.

    python benchmarks/training/generation.py [--documents 48] [--model embedded-gpt] [--repeats 3]

The model has random weights: the work of a token does not depend on them. Prompts have 10 to 150 tokens, and
texts end after 8 to 64 new ones. Each row takes its turn in every repeat, so that other work on the machine
reaches all of them; the figures are medians. The texts of all rows are compared.
"""

import argparse
import os
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.greedy_texts import Prompt
from myriad.evaluation.task_files import Generation
from myriad.job import load_job
from myriad.model.gpt import build_full

BATCHES = (1, 1024, 4096, 8192)
"""``--batch-tokens`` of each row; 1 is one document at a time."""
TEXT = "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))\n"


def make_prompts(tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Prompts of different lengths, whose texts have different lengths."""
    draw = torch.Generator().manual_seed(1)
    prompts = []
    for _ in range(count):
        length, new = (int(torch.randint(*span, (1,), generator=draw)) for span in ((10, 151), (8, 65)))
        tokens = torch.randint(256, (length,), generator=draw).tolist()
        prompts.append((tokenizer.decode(tokens), Generation((), new)))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--model", default="embedded-gpt", help="job whose model is used")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = load_job(options.model).model.model_copy(update={"initial_deviation": 0.2})
    tokenizer = Tokenizer.train([TEXT] * 4, min(280, config.vocabulary))
    model = FullModel(build_full(config, 1), tokenizer, config.sequence)
    prompts = make_prompts(tokenizer, options.documents)
    spent: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
    texts = {}
    for _ in range(options.repeats):
        for batch in BATCHES:
            began, began_cpu = time.perf_counter(), time.process_time()
            texts[batch] = model.generate(prompts, batch)
            spent[batch].append((time.perf_counter() - began, time.process_time() - began_cpu))
    assert all(found == texts[1] for found in texts.values()), "the texts depend on the batch"
    table = Table("batch tokens", "documents/s", "processor s", "speed", box=None)
    base = statistics.median(cpu for _, cpu in spent[1])
    for batch, found in spent.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        name = "one document" if batch == 1 else f"{batch:,}"
        table.add_row(name, f"{len(prompts) / wall:.1f}", f"{cpu:.2f}", f"{base / cpu:.1f} x")
    Console().print(table)


if __name__ == "__main__":
    main()
