"""Greedy generation of `myriad eval` in ranks, with caches of keys and values and without.

    python benchmarks/training/layout_generation.py [--layout tp=2] [--length 512] [--prompts 2] [--new 64]

Ranks of this machine generate the last tokens of texts of ``--length`` tokens, as evaluation during training
and `myriad eval --layout...` do, and again by passes over the whole texts. The model has random weights: the
work of a token does not depend on them. Processor time is that of all ranks. The time to read the prompts is
part of both rows. Ends with 1 if the texts differ.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.greedy_texts import Prompt
from myriad.evaluation.task_files import Generation
from myriad.job import load_job
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.partition import partition_layers
from myriad.telemetry.spans import Recorder
from myriad.train.task_evaluation import LayoutScorer, WindowBatches

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from ranks import run_ranks

TEXT = "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))\n"
CPU = torch.device("cpu")


def make_engine(config: ModelConfig, layout: Layout) -> Engine:
    """Build this rank's engine, with random weights."""
    definition, blank = GPT(config, seed=1), torch.zeros(1, config.sequence, dtype=torch.int64)
    return Engine(
        definition,
        open_world(layout, CPU),
        partition_layers(layout.partition, layout.num_stages, definition.kinds, [1.0] * (config.layers + 2)),
        Batch(blank, blank, blank[:, 0]),
        1,
        OptimizerConfig(),
        seed=1,
        dtype=torch.float32,
        device=CPU,
        recorder=Recorder(),
    )


def generate(
    config: ModelConfig, layout: Layout, tokenizer: Tokenizer, prompts: list[Prompt]
) -> list[tuple[list[str], float, float]]:
    """Return one rank's texts, wall seconds and processor seconds, with caches and without."""
    torch.set_num_threads(1)
    engine = make_engine(config, layout)
    engine.open_reader()
    replica, found = engine.groups.grid.index("dp"), []
    batches = WindowBatches(config.sequence, layout.dp, range(replica, replica + 1), CPU)
    scorer = LayoutScorer([], prompts, tokenizer, config.sequence, batches, len(prompts) * config.sequence)
    for reader in (engine.reader, None):
        engine.reader = reader
        began, began_cpu = time.perf_counter(), time.process_time()
        results = scorer.results(engine)
        assert results is not None
        found.append((results[1], time.perf_counter() - began, time.process_time() - began_cpu))
    engine.close()
    close_world()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", nargs="*", default=["tp=2"], help="axes of the layout")
    parser.add_argument("--model", default="embedded-gpt", help="job whose model is used")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text at its end")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new", type=int, default=64, help="tokens that are generated of each text")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    layout = Layout.model_validate(
        {key: int(value) for key, value in (one.split("=") for one in options.layout)}
    )
    changes = {"sequence": options.length, "initial_deviation": 0.2}
    config = load_job(options.model).model.model_copy(update=changes)
    tokenizer = Tokenizer.train([TEXT] * 4, min(280, config.vocabulary))
    draw = torch.Generator().manual_seed(1)
    words = [
        torch.randint(32, 127, (4 * options.length,), generator=draw).tolist() for _ in range(options.prompts)
    ]
    prompts: list[Prompt] = [(bytes(one).decode(), Generation((), options.new)) for one in words]
    ranks = run_ranks(layout.world, generate, config, layout, tokenizer, prompts)
    table = Table("", "ms a token", "processor ms a token", box=None)
    num_tokens = options.prompts * options.new
    for number, name in enumerate(("with caches", "without")):
        wall = max(rank[number][1] for rank in ranks)
        cpu = sum(rank[number][2] for rank in ranks)
        table.add_row(name, f"{1000 * wall / num_tokens:.1f}", f"{1000 * cpu / num_tokens:.1f}")
    Console().print(table)
    made = [rank[number][0] for rank in ranks for number in (0, 1)]
    if any(one != made[0] for one in made):
        raise SystemExit("the texts differ")


if __name__ == "__main__":
    main()
