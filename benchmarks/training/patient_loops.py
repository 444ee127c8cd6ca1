"""Iterations on shared cores while gloo's threads interrupt nobody, beside ones where they may.

    python benchmarks/training/patient_loops.py [--rounds 3] [--steps 4]

Layouts of the rehearsals (`rehearsal_cases.py`), all ranks in one host, each way in turns; what is changed is
`myriad.comm.gloo_setup` alone.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import myriad.comm.groups as groups_module

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

from gpt_ranks import Setup, train
from hosts import Hosts
from rehearsal_cases import CASES

_NAMES = ("dp2 zero2", "tp2 mb4 off", "tp2 mb4", "dp2 tp2 mb2", "tp4 mb8", "dp8 zero2", "pp8")


@contextmanager
def _as_gloo_has_them() -> Iterator[None]:
    """On a rank, which ends afterwards."""
    groups_module.low_priority_gloo_threads = nullcontext  # type: ignore[assignment]
    yield


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What it brings that gloo's threads interrupt nobody.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    print("| layout | as gloo has them, ms (least to most) | interrupting nobody | less |\n|---|---|---|---|")
    with Hosts(1) as host:
        host.set_rate(None)
        for case in (case for case in CASES if case.name in _NAMES):
            found: dict[str, list[float]] = {"gloo": [], "patient": []}
            for _ in range(options.rounds):
                for way, setup in (("gloo", Setup(around=_as_gloo_has_them)), ("patient", Setup())):
                    ranks = train(host, case.job, options.steps, setup, ranks_per_host=case.job.layout.world)
                    found[way] += ranks[0].step_seconds
            usual, patient = (statistics.median(seconds) for seconds in found.values())
            cells = " | ".join(_told(seconds) for seconds in found.values())
            print(f"| {case.name} | {cells} | {1 - patient / usual:.0%} |", flush=True)


def _told(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


if __name__ == "__main__":
    main(sys.argv[1:])
