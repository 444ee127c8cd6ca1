"""One iteration before and after each pass, on real processes over shaped links: real spans as pictures.

    python benchmarks/links/timeline.py [--out FOLDER] [--only pipeline data optimizer tensor] [--rounds 3]
                                   [--quick]

Two hosts of one core each. For each pass the same job runs with its switch off and on (overlap.tensor: off,
in slices and in turns), one after the other; of each, the iteration of median length is drawn
as FOLDER/timeline-PASS.svg (default: docs/images). The links are so fast that about as much communication is
needed as can be hidden: with much faster links there is nothing to see, with much slower ones nothing hides.
The benchmark checks that all settings give the same losses.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from myriad.data.corpus_cache import prepare_embedded
from myriad.reports.charts.span_chart import ChartLane, Panel, draw_spans

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from gpt_ranks import RankRun, make_job, train
from hosts import Hosts

VOCABULARY = 1024
MODEL = {
    "model.layers": 6,
    "model.hidden": 256,
    "model.sequence": 256,
    "model.vocabulary": VOCABULARY,
    "data.vocabulary": VOCABULARY,
    "model.block": "parallel",
    "overlap.pipeline": True,
    "overlap.data": True,
    "overlap.optimizer": True,
    "overlap.tensor": "turns",
}


@dataclass(frozen=True)
class Case:
    """One picture."""

    name: str
    layout: str
    rate: str
    before: Mapping[str, object]
    after: Mapping[str, Mapping[str, object]]
    """Changes to that by the value of the pass's key."""
    shift: float = 0.0
    """Share of an iteration by which the window begins later: what happens at its end lies inside then."""


CASES = (
    Case(
        "pipeline",
        "2 pipeline ranks x 2 stages",
        "200mbit",
        {"layout.pp": 2, "layout.virtual_stages": 2, "train.global_batch": 8, "overlap.pipeline": False},
        {"true": {"overlap.pipeline": True}},
    ),
    Case(
        "data",
        "2 data-parallel ranks, ZeRO 2",
        "400mbit",
        {
            "layout.dp": 2,
            "layout.zero": 2,
            "layout.micro_batch": 2,
            "train.global_batch": 8,
            "overlap.data": False,
            "overlap.optimizer": False,
        },
        {"true": {"overlap.data": True}},
    ),
    Case(
        "optimizer",
        "2 data-parallel ranks, ZeRO 2",
        "400mbit",
        {
            "layout.dp": 2,
            "layout.zero": 2,
            "layout.micro_batch": 2,
            "train.global_batch": 8,
            "overlap.optimizer": False,
        },
        {"true": {"overlap.optimizer": True}},
        shift=0.5,
    ),
    Case(
        "tensor",
        "2 tensor-parallel ranks",
        "400mbit",
        {"layout.tp": 2, "layout.micro_batch": 8, "train.global_batch": 8, "overlap.tensor": "off"},
        {kind: {"overlap.tensor": kind} for kind in ("slices", "turns")},
    ),
)


def panel_of(state: str, visits: Sequence[Sequence[RankRun]], case: Case) -> Panel:
    """The iteration of median length on rank 0. A window that reaches into the next one needs a next one."""
    lengths = [
        (seconds, visit, number)
        for visit, ranks in enumerate(visits)
        for number, seconds in enumerate(ranks[0].step_seconds[:-1])
    ]
    _, visit, number = sorted(lengths)[len(lengths) // 2]
    ranks = visits[visit]
    first, middle, last = ranks[0].begun[number : number + 3]
    start, stop = first + case.shift * (middle - first), middle + case.shift * (last - middle)
    lanes = [ChartLane(f"rank {rank}", run.spans) for rank, run in enumerate(ranks)]
    return Panel(f"overlap.{case.name} = {state}: {1e3 * (stop - start):.0f} ms", start, stop, lanes)


def check_losses(before: RankRun, after: RankRun) -> None:
    """A pass changes when things happen, not what comes out."""
    for one, other in zip(before.losses, after.losses, strict=True):
        assert abs(one - other) <= 1e-5 * abs(one), f"losses differ: {one} and {other}"


def draw(hosts: Hosts, case: Case, rounds: int, steps: int, folder: Path) -> None:
    """Runs all settings in turns and writes the picture."""
    hosts.set_rate(case.rate)
    before = {**MODEL, **case.before}
    off = "off" if case.name == "tensor" else "false"
    jobs = {off: make_job(before)} | {state: make_job(before | keys) for state, keys in case.after.items()}
    visits = [{state: train(hosts, job, steps) for state, job in jobs.items()} for _ in range(rounds)]
    for state in case.after:
        check_losses(visits[0][off][0], visits[0][state][0])
    panels = [panel_of(state, [visit[state] for visit in visits], case) for state in jobs]
    path = folder / f"timeline-{case.name}.svg"
    path.write_text(draw_spans(f"{case.layout}, links of {case.rate}", panels))
    took = {
        state: 1e3 * median(seconds for visit in visits for seconds in visit[state][0].step_seconds)
        for state in jobs
    }
    for state in case.after:
        name = case.name if state == "true" else f"{case.name}, {state}"
        ratio = took[off] / took[state]
        row = f"| {name} | {case.layout} | {case.rate} | {took[off]:.0f} | {took[state]:.0f} | {ratio:.2f} |"
        print(f"{row} {path} ({path.stat().st_size / 1024:.0f} KiB) |", flush=True)


def main() -> None:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description="One iteration before and after each pass, as pictures.")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some of the passes")
    parser.add_argument("--rounds", type=int, default=3, help="visits to each setting")
    parser.add_argument("--steps", type=int, default=5, help="counted iterations of a visit, at least 2")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    prepare_embedded(vocabulary=VOCABULARY)
    print("| pass | layout | links | off, ms | on, ms | ratio | picture |\n|---|---|---|---|---|---|---|")
    with Hosts(2) as hosts:
        for case in CASES:
            if case.name in options.only:
                draw(hosts, case, 1 if options.quick else options.rounds, options.steps, options.out)


if __name__ == "__main__":
    main()
