"""The job of `make train` beside a plain loop in nanoGPT's style, given the same processor time.

    python benchmarks/training/default_job.py --runs FOLDER [--seeds 3] [--jobs 2]

The documents that the job holds out are halved, the longest first, each to the shorter half. The learning
rate of either side is the one with the fewest bits per byte on one half; the other half, by which nothing was
chosen, gives the figures. Training text, tokenizer, batch and the order of the samples are the job's on both
sides.

Each training is one process of one thread. The loop trains until it has used the processor seconds that
Myriad took (median), which other work on the machine changes less than wall time; its schedule follows the
share that it has used. Of float32 or bfloat16, compiled or not, the setting with the quickest step is taken,
and neither the choice nor the compilation counts. Finished trainings are kept in ``--runs``, where a command
that was interrupted continues.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HALVES = ("choose", "report")
RATES = {"make train": (0.01, 0.015, 0.02, 0.03), "plain loop": (0.001, 0.002, 0.004, 0.008)}
PLAIN = "plain loop"
WARM_UP = 0.025
"""Share of the training in which the plain loop's rate rises, as the job's."""


@dataclass(frozen=True)
class Trained:
    """What one training gave."""

    bits: dict[str, float]
    """Bits per byte of each half of the held-out text."""
    processor_seconds: float
    steps: int
    setting: str = ""


def halve_held_out(folder: Path) -> dict[str, Path]:
    """Prepare each half of the documents that the embedded corpus holds out, or return those that are
    there."""
    from myriad.data.corpus_cache import embedded_documents, prepare_embedded, split_documents
    from myriad.data.prepare import PrepareOptions, prepare

    corpus = prepare_embedded(vocabulary=1024)
    corpora = {half: folder / half for half in HALVES}
    if all((path / "manifest.json").exists() for path in corpora.values()):
        return corpora
    _, held_out = split_documents(list(embedded_documents()))
    halves: dict[str, list[str]] = {half: [] for half in HALVES}
    for one in sorted(held_out, key=lambda document: (-len(document.text), document.name)):
        min(halves.values(), key=lambda texts: sum(map(len, texts))).append(one.text)
    for half, texts in halves.items():
        lines = folder / f"{half}.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([str(lines)], corpora[half], PrepareOptions(tokenizer=corpus, validation=0.0))
    return corpora


def job_of(halves: dict[str, Path], rate: float, seed: int) -> Any:
    """Return the job of `make train` at a rate, with both halves as validation sets."""
    from myriad.data.corpus_opening import open_corpus
    from myriad.job import load_job

    usual = load_job("embedded")
    window = usual.train.global_batch * usual.model.sequence
    batches = [(open_corpus(str(path), "train").num_tokens - 1) // window for path in halves.values()]
    sets = ", ".join(f'{{name = "{half}", path = "{path}"}}' for half, path in halves.items())
    return load_job(
        "embedded",
        [
            f"data.validation_sets=[{sets}]",
            f"data.validation_batches={min(batches)}",
            f"optimizer.learning_rate={rate}",
            f"train.seed={seed}",
            f"train.validate_every={usual.train.steps}",
            "train.threads=1",
            "train.sample_prompt=off",
            "checkpoint.every=0",
        ],
    )


def train_myriad(halves: dict[str, Path], folder: Path, rate: float, seed: int) -> Trained:
    """Train the job in this process."""
    from myriad.run import Run
    from myriad.train.in_process import train_in_process

    run, job = Run(folder), job_of(halves, rate, seed)
    run.create_or_resume(job)
    began = time.process_time()
    train_in_process(run)
    seconds = time.process_time() - began
    found = [event for event in run.read_events() if event["event"] == "validation_set"]
    bits = {event["name"]: event["bits_per_byte"] for event in found}
    return Trained({half: bits[half] for half in HALVES}, seconds, job.train.steps)


class PlainLoop:
    """nanoGPT's model and loop on the job's samples."""

    def __init__(self, job: Any) -> None:
        from myriad.comm.grid import RankGrid
        from myriad.comm.layout import Layout
        from myriad.data.corpus import BatchReader
        from myriad.data.corpus_opening import open_corpora

        self.job, self._grid = job, RankGrid(Layout(), 0)
        self._corpora = open_corpora(job.data, job.model.sequence)
        shape = (job.train.global_batch, job.shares, job.layout.micro_batch, job.model.window)
        self._reader = BatchReader(self._corpora, job.train.seed, *shape)

    def build(self, precision: str, *, compiled: bool) -> tuple[Any, Callable[..., float]]:
        """Return a model and its step, which takes tokens, targets and the learning rate."""
        import torch

        from peers import nanogpt_loop

        model, torch_seed = self.job.model, self.job.train.seed
        torch.manual_seed(torch_seed)
        config = nanogpt_loop.GPTConfig(
            model.sequence, model.vocabulary, model.layers, model.heads, model.hidden
        )
        gpt = nanogpt_loop.GPT(config)
        return gpt, nanogpt_loop.build_step(gpt, precision=precision, compiled=compiled)

    def batch(self, step: int) -> Any:
        """Return the tokens and targets of a step, those of the job."""
        import numpy as np
        import torch

        from myriad.train.data_loader import to_batch

        batch = self.job.train.global_batch
        rows = np.empty((batch, self._corpora.width), np.int32)
        self._reader.read(step * batch, range(batch), rows)
        return to_batch(self.job, rows, step * batch, 0, torch.device("cpu"))

    def quickest(self) -> tuple[str, bool]:
        """Return the precision, and whether to compile, with the fewest processor seconds of a step."""
        found: dict[tuple[str, bool], float] = {}
        for precision in ("float32", "bfloat16"):
            for compiled in (False, True):
                _, step = self.build(precision, compiled=compiled)
                seconds = []
                for number in range(30):
                    data = self.batch(number)
                    began = time.process_time()
                    step(data.inputs, data.targets, 1e-3)
                    seconds.append(time.process_time() - began)
                found[precision, compiled] = statistics.median(seconds[10:])
        return min(found, key=lambda setting: found[setting])

    def train(self, rate: float, budget_seconds: float, setting: Path) -> Trained:
        """Train for so many processor seconds, and score both halves. ``setting``: file with what `quickest`
        found."""
        if not setting.exists():
            setting.write_text(json.dumps(self.quickest()))
        precision, compiled = json.loads(setting.read_text())
        gpt, step = self.build(precision, compiled=compiled)
        first = self.batch(0)
        step(first.inputs, first.targets, 0.0)  # compiles
        used, steps = 0.0, 0
        while used < budget_seconds:
            began = time.process_time()
            data = self.batch(steps)
            step(data.inputs, data.targets, rate * height(used / budget_seconds))
            used, steps = used + time.process_time() - began, steps + 1
        shown = f"{precision}{', compiled' if compiled else ''}"
        return Trained({half: self._bits(gpt, half) for half in HALVES}, used, steps, shown)

    def _bits(self, gpt: Any, half: str) -> float:
        import torch

        from myriad.train.data_loader import Validation

        (one,) = (found for found in self.job.data.validation_sets if found.name == half)
        held = Validation(self.job, self._grid, torch.device("cpu"), validation_set=one)
        with torch.no_grad():
            batches = map(held.batch, range(held.num_batches))
            loss = statistics.mean(gpt(one.inputs.long(), one.targets.long()).item() for one in batches)
        found = held.bits_per_byte(loss)
        assert found is not None, "the half has a tokenizer"
        return found


def height(progress: float) -> float:
    """Return the learning rate over its peak: nanoGPT's warm-up, and a cosine down to a tenth."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def train(side: str, runs: Path, budget_seconds: float, rate: float, seed: int) -> Trained:
    """Train one side, or read what an earlier command trained."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    folder = runs / f"{side.replace(' ', '-')}-{rate:g}-{seed}"
    result = folder / "trained.json"
    if result.exists():
        return Trained(**json.loads(result.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    halves = {half: runs / half for half in HALVES}
    if side == PLAIN:
        found = PlainLoop(job_of(halves, rate, seed)).train(rate, budget_seconds, runs / "setting.json")
    else:
        found = train_myriad(halves, folder / "run", rate, seed)
    result.write_text(json.dumps(asdict(found)))
    return found


def train_all(
    side: str, runs: Path, pairs: Sequence[tuple[float, int]], jobs: int, budget_seconds: float
) -> list[Trained]:
    """Train one side at each pair of a rate and a seed."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        rates, seeds = zip(*pairs, strict=True)
        found = []
        results = pool.map(partial(train, side, runs, budget_seconds), rates, seeds)
        for pair, one in zip(pairs, results, strict=True):
            shown = ", ".join(f"{half} {bits:.4f}" for half, bits in one.bits.items())
            print(f"  {side}, rate {pair[0]:g}, seed {pair[1]}: {shown}", file=sys.stderr, flush=True)
            found.append(one)
    return found


def compare(side: str, options: argparse.Namespace, budget_seconds: float) -> list[Trained]:
    """Choose the rate of one side, train the other seeds, and print the side's row."""
    rates = options.rates if side != PLAIN else options.plain_rates
    first = train_all(side, options.runs, [(rate, 1) for rate in rates], options.jobs, budget_seconds)
    chosen = dict(zip(rates, (one.bits["choose"] for one in first), strict=True))
    best = min(chosen, key=lambda rate: chosen[rate])
    pairs = [(best, seed) for seed in range(1, options.seeds + 1)]
    found = train_all(side, options.runs, pairs, options.jobs, budget_seconds)
    cells = (
        f"{side} ({found[0].setting})" if found[0].setting else side,
        f"{statistics.median(one.processor_seconds for one in found):.0f}",
        f"{statistics.median(one.steps for one in found):,.0f}",
        ", ".join(f"{rate:g}: {bits:.3f}" for rate, bits in sorted(chosen.items())),
        f"{best:g}",
        ", ".join(f"{one.bits['report']:.3f}" for one in found),
        f"{statistics.mean(one.bits['report'] for one in found):.3f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)
    return first


def main() -> None:
    """Train both sides, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="keep the trainings here")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES["make train"])
    parser.add_argument("--plain-rates", type=float, nargs="+", default=RATES[PLAIN])
    parser.add_argument("--seeds", type=int, default=1, help="trainings at the best rate")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    options.runs.mkdir(parents=True, exist_ok=True)
    halve_held_out(options.runs)
    print("| side | processor s | steps | bits per byte of the first half, by rate | rate ", end="")
    print("| bits per byte of the other half, each seed | mean |\n|---|---|---|---|---|---|---|", flush=True)
    ours = compare("make train", options, math.inf)
    compare(PLAIN, options, statistics.median(one.processor_seconds for one in ours))


if __name__ == "__main__":
    main()
