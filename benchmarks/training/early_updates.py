"""Updates inside the backward against updates behind the gradients' norm: seconds of a step.

    python benchmarks/training/early_updates.py [--rate 400mbit] [--rounds 5] [--steps 3]

One process, and two ranks with a core and a shaped link each (`layout.zero` 1), train the same small GPT
without clipping; `overlap.optimizer_in_backward` on and off take turns. Medians over all rounds, smallest and
largest; both learn the same bits (`tests/processes/test_early_updates.py`).
"""

import argparse
import statistics
import sys
from pathlib import Path

from myriad.data.corpus_cache import prepare_embedded

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from gpt_ranks import make_job, train
from hosts import Hosts

VOCABULARY = 1024
MODEL = {
    "model.layers": 8,
    "model.hidden": 256,
    "model.sequence": 256,
    "model.vocabulary": VOCABULARY,
    "data.vocabulary": VOCABULARY,
    "optimizer.clip_norm": None,
    "train.global_batch": 4,
}
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {"layout.micro_batch": 4},
    "dp2, ZeRO 1": {"layout.dp": 2, "layout.zero": 1, "layout.micro_batch": 2},
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="400mbit", help="of each link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="counted ones, of each visit")
    options = parser.parse_args()
    prepare_embedded(vocabulary=VOCABULARY)
    seconds: dict[tuple[str, bool], list[float]] = {}
    with Hosts(2) as hosts:
        hosts.set_rate(options.rate)
        for _ in range(options.rounds):
            for name, layout in LAYOUTS.items():
                for early in (False, True):
                    job = make_job({**MODEL, **layout, "overlap.optimizer_in_backward": early})
                    first = train(hosts, job, options.steps)[0]
                    seconds.setdefault((name, early), []).extend(first.step_seconds)
    print(f"| {options.rate} | behind the norm: ms | inside the backward: ms |\n|---|---|---|")
    for name in LAYOUTS:
        print(f"| {name} | {' | '.join(_told(seconds[name, early]) for early in (False, True))} |")


def _told(seconds: list[float]) -> str:
    low, middle, high = (1e3 * x for x in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
