"""Text streamed by the node's loader against a corpus that is prepared first: start, and tokens a second.

    python benchmarks/data/streaming.py --megabytes 8 32

The text is Python's standard library as JSONL, repeated in another order, with the tokenizer of the embedded
corpus. CPU seconds are those of all processes that work. On a machine that does nothing else, wall seconds
are about CPU seconds divided by threads or workers.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from myriad.data.config import DataConfig
from myriad.data.corpus import read_batch
from myriad.data.corpus_cache import embedded_documents, prepare_embedded
from myriad.data.corpus_opening import open_corpora
from myriad.data.loader import LoaderClient, LoaderSpec
from myriad.data.prepare import PrepareOptions, prepare
from myriad.data.streaming.streamed_corpus import StreamedCorpus, StreamPlace

TICKS = os.sysconf("SC_CLK_TCK")
SEQUENCE, BATCH = 512, 32


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def write_texts(folder: Path, megabytes: int) -> None:
    """Write files of about 8 MB."""
    folder.mkdir()
    documents = [one.text for one in embedded_documents()]
    chosen = np.random.default_rng(1)
    for number in range(0, megabytes, 8):
        size, left = 0, min(8, megabytes - number) * 1_000_000
        with (folder / f"{number:05}.jsonl").open("w") as file:
            while size < left:
                size += file.write(json.dumps({"text": documents[chosen.integers(len(documents))]}) + "\n")


def measure_stream(folder: Path, tokenizer: Path, threads: int, seconds: float) -> dict[str, float]:
    """Time the loader to its first batch, and then as fast as it can."""
    config = DataConfig(corpus=f"raw:{folder}", tokenizer=str(tokenizer), tokenizer_threads=threads)
    with tempfile.TemporaryDirectory() as streams:
        corpus = StreamedCorpus(config.corpus, config, "train", StreamPlace(Path(streams)))
        corpus.keep_sources()
        spec = LoaderSpec(
            name=f"streaming-{os.getpid()}-{threads}",
            data=config,
            sequence=SEQUENCE,
            global_batch=BATCH,
            seed=1,
            rows=((0, BATCH),),
            streams=streams,
        )
        began = time.perf_counter()
        with LoaderClient(spec) as client:
            client.get(0)
            pid = client.loader_pid or 0
            first_wall, first_cpu, step = time.perf_counter() - began, cpu_seconds(pid), 0
            while time.perf_counter() < began + first_wall + seconds:
                client.get(step := step + 1)
            wall, cpu = time.perf_counter() - began, cpu_seconds(pid)
        [index] = Path(streams).glob("*/*.jsonl")
        tokens = sum(json.loads(line)["tokens"] for line in index.read_text().splitlines())
    return {
        "first_wall": first_wall,
        "first_cpu": first_cpu,
        "rate": tokens / wall,
        "cpu_rate": tokens / cpu,
    }


def measure_prepare(folder: Path, tokenizer: Path) -> dict[str, float]:
    """Time `myriad data prepare` with one process, and the first batch."""
    began, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as output:
        made = Path(output) / "corpus"
        manifest = prepare([str(folder)], made, PrepareOptions(tokenizer=tokenizer, validation=0.0))
        corpora = open_corpora(DataConfig(corpus=str(made)), SEQUENCE)
        read_batch(corpora, corpora.sampler(1), range(BATCH))
        used = time.process_time() - cpu
        wall = time.perf_counter() - began
    tokens = manifest.num_tokens("train")
    return {"first_wall": wall, "first_cpu": used, "rate": tokens / wall, "cpu_rate": tokens / used}


def main() -> None:
    """Measure each way of reading each text, and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[8, 32], help="text, in MB")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of the loader")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each stream after its start")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = prepare_embedded()
    print(
        "| text, MB | way | first batch, wall s | first batch, CPU s | tokens/s, wall | tokens/s of a core |"
    )
    print("|---|---|---|---|---|---|")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "texts"
            write_texts(folder, megabytes)
            rows = {f"streamed, {one} threads": measure_stream(folder, tokenizer, one, options.seconds)
                    for one in options.threads}  # fmt: skip
            rows["prepared, 1 process"] = measure_prepare(folder, tokenizer)
        for name, found in rows.items():
            rates = f"{found['rate']:,.0f} | {found['cpu_rate']:,.0f}"
            print(
                f"| {megabytes} | {name} | {found['first_wall']:.1f} | {found['first_cpu']:.1f} | {rates} |"
            )


if __name__ == "__main__":
    main()
