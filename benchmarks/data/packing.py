"""Documents packed into windows, joined end to end, and padded one by one: tokens a second, and the loss.

    python benchmarks/data/packing.py [--sequence 512] [--tokens 400000] [--seeds 3] [--folder FOLDER]

The documents are the top-level functions and classes of the Python standard library, from the source of this
installation: short texts of very different lengths, as in fine-tuning. The GPT of `embedded-gpt` trains on
them for as many predicted tokens each way, one process of one thread. Every training is validated on the same
packed windows of held-out documents. Tokens a second count no padding.

Padded windows, with one document or one piece of a long one in each, are what packing replaces; Myriad itself
does not train on them.
"""

import argparse
import ast
import json
import os
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from myriad.data.corpus_opening import open_corpora
from myriad.data.prepare import PrepareOptions, prepare
from myriad.data.windows import Packing, pack_documents
from myriad.job import Job, load_job
from myriad.run import Run

WAYS = ("packed", "joined", "padded")
BATCH = 8


def definitions() -> Iterator[str]:
    """The source of each top-level function and class of the standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield ast.get_source_segment(text, node) or ""


def make_corpus(folder: Path) -> Path:
    """Prepare the corpus, or return the one that is there."""
    texts, corpus = folder / "definitions.jsonl", folder / "corpus"
    if not corpus.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in definitions() if text))
        prepare([str(texts)], corpus, PrepareOptions(vocabulary=1024, validation=0.05))
    return corpus


def one_by_one(documents: NDArray[np.int64], sequence: int) -> Packing:
    """Each piece in a window of its own."""
    packed = pack_documents(documents, sequence)
    return packed._replace(firsts=np.arange(len(packed.lengths) + 1))


@dataclass(frozen=True)
class Trained:
    """What one training gave."""

    tokens_per_second: float
    """Median of the second half of the steps."""
    loss: float
    """Nats for each token of the held-out documents."""
    filled: float
    """Share of the positions that are no padding."""


def make_job(corpus: Path, way: str, sequence: int, tokens: int, seed: int) -> tuple[Job, float]:
    """The job of one training, and the share of its positions that are no padding."""
    documents = "joined" if way == "joined" else "packed"
    keys: dict[str, Any] = {
        "data.corpus": corpus,
        "data.documents": documents,
        "data.validation_batches": 4,
        "model.sequence": sequence,
        "layout.micro_batch": BATCH,
        "train.global_batch": BATCH,
        "train.seed": seed,
        "train.threads": 1,
        "train.sample_prompt": "off",
        "checkpoint.every": 0,
    }
    job = load_job("embedded-gpt", [f"{key}={value}" for key, value in keys.items()])
    corpora = open_corpora(job.data, sequence)
    filled = 1.0
    if way != "joined":
        (windows,) = corpora.packed
        filled = float(windows.packing.lengths.sum() / (windows.count * sequence))
    steps = round(tokens / (filled * BATCH * sequence))
    lengths = {"train.steps": steps, "train.validate_every": steps, "optimizer.warmup_steps": steps // 40}
    return load_job("embedded-gpt", [f"{key}={value}" for key, value in (keys | lengths).items()]), filled


def train(corpus: Path, way: str, sequence: int, tokens: int, seed: int) -> Trained:
    """Train one way, in this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from myriad.train import trainer
    from myriad.train.data_loader import Validation
    from myriad.train.in_process import train_in_process

    def packed_validation(job: Job, *others: Any) -> Validation:
        data = job.data.model_copy(update={"documents": "packed"})
        return Validation(job.model_copy(update={"data": data}), *others)

    packs = one_by_one if way == "padded" else pack_documents
    with tempfile.TemporaryDirectory() as folder, mock.patch("myriad.data.corpus.pack_documents", packs):
        job, filled = make_job(corpus, way, sequence, tokens, seed)
        run = Run(Path(folder))
        run.create_or_resume(job)
        with mock.patch.object(trainer, "Validation", packed_validation):
            with mock.patch("myriad.train.data_loader.open_corpora", _plainly_packed):
                train_in_process(run)
        losses = [event["loss"] for event in run.read_events() if event["event"] == "validation"]
        speeds = [line["tokens_per_second"] for line in run.read_metrics()]
    return Trained(statistics.median(speeds[len(speeds) // 2 :]), losses[-1], filled)


def _plainly_packed(*arguments: Any, **options: Any) -> Any:
    """Open the corpora of a validation, whose windows are the same for every way."""
    with mock.patch("myriad.data.corpus.pack_documents", pack_documents):
        corpora = open_corpora(*arguments, **options)
        _ = corpora.windows
    return corpora


def main() -> None:
    parser = argparse.ArgumentParser(description="Packed, joined and padded documents side by side.")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400_000, help="predicted tokens of each training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the corpus here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        corpus = make_corpus(options.folder or Path(made))
        found: dict[str, list[Trained]] = {way: [] for way in WAYS}
        for seed in range(1, options.seeds + 1):
            for way in WAYS:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    arguments = (corpus, way, options.sequence, options.tokens, seed)
                    found[way].append(process.submit(train, *arguments).result())
                print(f"  {way}, seed {seed}: {found[way][-1]}", file=sys.stderr, flush=True)
        print_table(found, document_lengths(corpus), options.sequence, options.tokens)


def document_lengths(corpus: Path) -> NDArray[np.int64]:
    """Tokens of each document of the training split."""
    job, _ = make_job(corpus, "joined", 32, 10_000, 1)
    (opened,) = open_corpora(job.data, 32).corpora
    return np.concatenate([shard.document_lengths() for shard in opened.shards])


def print_table(
    found: dict[str, list[Trained]], lengths: NDArray[np.int64], sequence: int, tokens: int
) -> None:
    """One row for each way."""
    shown = ", ".join(f"{length:.0f}" for length in np.percentile(lengths, [10, 50, 90, 99]))
    print(f"{len(lengths):,} documents, tokens of the 10th, 50th, 90th, 99th percentile: {shown}")
    print(f"windows of {sequence}, {tokens:,} predicted tokens each\n")
    print("| windows | no padding | tokens/s | to padded | held-out loss, each seed | mean |")
    print("|---|---|---|---|---|---|")
    padded = statistics.median(one.tokens_per_second for one in found["padded"])
    for way, trained in found.items():
        speed = statistics.median(one.tokens_per_second for one in trained)
        losses = ", ".join(f"{one.loss:.3f}" for one in trained)
        cells = (
            way,
            f"{trained[0].filled:.1%}",
            f"{speed:,.0f}",
            f"{speed / padded:.2f} x",
            losses,
            f"{statistics.mean(one.loss for one in trained):.3f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
