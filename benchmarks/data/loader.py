"""One loader process for each node against one for each rank: CPU time, memory, and how long ranks wait.

    python benchmarks/data/loader.py --ranks 4

The ranks are processes that take a batch and then sleep, as a rank does while its accelerator computes; all
need the same rows, as the tensor- and pipeline-parallel ranks of a node do. Loader memory is proportional set
size: pages shared by n processes count 1/n for each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from myriad.data.config import DataConfig
from myriad.data.corpus_opening import open_corpora
from myriad.data.loader import LoaderClient, LoaderSpec

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pss_bytes(pid: int) -> int:
    """Proportional set size: what the process alone costs the machine."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def run_rank(settings: argparse.Namespace) -> None:
    """One rank; the result is one line of JSON."""
    spec = LoaderSpec.model_validate_json(settings.spec)
    waits = []
    with LoaderClient(spec, settings.rank, settings.num_ranks) as client:
        client.get(0)
        pid = client.loader_pid
        start_cpu, own_cpu = cpu_seconds(pid) if pid else 0.0, time.process_time()
        for step in range(1, settings.steps + 1):
            before = client.wait_seconds
            client.get(step)
            waits.append(client.wait_seconds - before)
            time.sleep(settings.step_seconds)
        result = {
            "start_cpu": start_cpu,
            "loader_cpu": cpu_seconds(pid) - start_cpu if pid else 0.0,
            "rank_cpu": time.process_time() - own_cpu,
            "pss": pss_bytes(pid) if pid else 0,
            "waits": waits,
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # the loaders live until all have been measured


def measure(settings: argparse.Namespace, per_rank: bool) -> dict[str, float]:
    """A node's ranks together."""
    ranks = []
    for rank in range(settings.ranks):
        place = (0, 1) if per_rank else (rank, settings.ranks)
        spec = LoaderSpec(
            name=f"bench-{os.getpid()}-{time.monotonic_ns() if per_rank else 'node'}",
            data=DataConfig(),
            sequence=settings.sequence,
            global_batch=settings.rows,
            seed=1,
            rows=((0, settings.rows),),
        )
        own = ["--spec", spec.model_dump_json(), "--rank", str(place[0]), "--num-ranks", str(place[1])]
        shared = ["--steps", str(settings.steps), "--step-seconds", str(settings.step_seconds)]
        command = [sys.executable, __file__, *own, *shared]
        ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    results = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout]
    for rank in ranks:
        rank.communicate("")
    waits = np.array([result["waits"] for result in results])
    return {
        "loaders": settings.ranks if per_rank else 1,
        "start_cpu_seconds": sum(result["start_cpu"] for result in results),
        "loader_cpu_ms_per_step": 1000 * sum(result["loader_cpu"] for result in results) / settings.steps,
        "rank_cpu_ms_per_step": 1000 * sum(result["rank_cpu"] for result in results) / waits.size,
        "loader_pss_mib": sum(result["pss"] for result in results) / 2**20,
        "wait_ms_mean": 1000 * float(waits.mean()),
        "wait_ms_p99": 1000 * float(np.quantile(waits, 0.99)),
    }


def main() -> None:
    """Both ways, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="of the node (default 4)")
    parser.add_argument("--rows", type=int, default=32, help="sequences in a step (default 32)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=200, help="measured steps (default 200)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="of computing (default 0.05)")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-ranks", type=int, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.spec:
        run_rank(settings)
        return
    open_corpora(DataConfig(), settings.sequence)  # made once, outside the measurement
    rows = {"one for each node": measure(settings, False), "one for each rank": measure(settings, True)}
    names = list(next(iter(rows.values())))
    tokens = f"{settings.rows} x {settings.sequence} tokens"
    print(f"{settings.ranks} ranks, {tokens} and {settings.step_seconds} s a step")
    print("| loader | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{values[column]:.3g}" for column in names) + " |")


if __name__ == "__main__":
    main()
