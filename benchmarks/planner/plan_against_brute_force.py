"""The layout that the planner would choose, against the best of all layouts, every one of them measured.

    python benchmarks/planner/plan_against_brute_force.py --ranks 4 --link 200mbit [--rounds 1] [--steps 2]
                                                  [--cluster FILE] [--kept FILE] [--closer 5]

All layouts of one small GPT on so many ranks, each a process in a host of its own behind a link: every split
in dp, tp and pp, ZeRO 0 to 3, every micro-batch, one and two pieces of the model for each pipeline rank,
plain and zero-bubble schedules, overlaps on. The planner sees the measured machine and the rate of the
links. Then every layout trains, in turns; the ``--closer`` best of them and the chosen one are visited again,
so that the best of many is not the luckiest. Target: the chosen one takes at most 5 % longer than
the best.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from myriad.data.corpus_cache import prepare_embedded
from myriad.errors import BadInputError
from myriad.planner.cluster_config import Cluster
from myriad.recipes import read_recipe
from rehearsal import PATIENCE_SECONDS, spearman
from rehearsal_cases import MODEL, Case, Measured, Rehearsal, read, write
from rehearsal_predict import measure_way, predicted_seconds

__all__ = ["all_cases"]


def all_cases(ranks: int, batch: int) -> Iterator[Case]:
    """Every layout that the job allows."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for dp, tp, pp in product(sizes, sizes, sizes):
        if dp * tp * pp != ranks:
            continue
        zeros = range(4) if dp > 1 else (0,)
        schedules: tuple[tuple[int, str | None], ...] = ((1, None),)
        if pp > 1:
            schedules = ((1, None), (2, None), (1, "zero-bubble"))
        micro_batches = [size for size in range(1, batch + 1) if batch % (size * dp) == 0]
        for zero, (virtual_stages, schedule), micro_batch in product(zeros, schedules, micro_batches):
            case = _case(dp, tp, pp, zero, virtual_stages, schedule, micro_batch)
            if _is_legal(case):
                yield case


def _case(
    dp: int, tp: int, pp: int, zero: int, virtual_stages: int, schedule: str | None, micro_batch: int
) -> Case:
    name = f"dp{dp} tp{tp} pp{pp} zero{zero} vs{virtual_stages} mb{micro_batch} {schedule or 'plain'}"
    keys = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.zero": zero,
        "layout.virtual_stages": virtual_stages,
        "layout.micro_batch": micro_batch,
        "layout.schedule": schedule,
    }
    return Case(name, keys)


def _is_legal(case: Case) -> bool:
    try:
        predicted_program = case.job.num_micro_batches
    except BadInputError:
        return False
    return predicted_program > 0


def table(found: list[Measured], predicted: dict[str, float], chosen: str) -> str:
    """The best ten by the clock, the chosen one, and what it misses."""
    found.sort(key=lambda one: one.seconds)
    best = found[0].seconds
    lines = ["| layout | measured, ms | over the best | predicted, ms |", "|---|---|---|---|"]
    for place, one in enumerate(found, 1):
        if place <= 10 or one.case == chosen:
            mark = " (chosen)" if one.case == chosen else ""
            lines.append(
                f"| {place}. {one.case}{mark} | {1e3 * one.seconds:.0f} | {one.seconds / best - 1:+.1%} | "
                f"{1e3 * predicted[one.case]:.0f} |"
            )
    taken = next(one for one in found if one.case == chosen)
    correlation = spearman([one.seconds for one in found], [predicted[one.case] for one in found])
    quiet = sum(one.num_quiet > 0 for one in found)
    return "\n".join(
        [
            *lines,
            "",
            f"{len(found)} layouts, {quiet} of them measured in quiet; "
            f"slowest {1e3 * found[-1].seconds:.0f} ms; rank correlation {correlation:.3f}",
            f"the chosen layout takes {taken.seconds / best - 1:.1%} longer than the best",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner's choice against all layouts, measured.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="200mbit", help="of each rank, as tc writes it")
    parser.add_argument("--rounds", type=int, default=1, help="visits to each layout; 0: none")
    parser.add_argument("--closer", type=int, default=5, help="best layouts that get two visits more")
    parser.add_argument("--steps", type=int, default=2, help="counted iterations of a visit")
    parser.add_argument(
        "--cluster", type=Path, required=True, help="the machine, as `plan --measure` wrote it"
    )
    parser.add_argument("--kept", type=Path, help="file of what was measured, to go on from")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds to wait for quiet")
    parser.add_argument("--slower", type=float, help="leave out what is predicted so many times the best")
    options = parser.parse_args()
    machine = Cluster.model_validate(read_recipe("clusters", str(options.cluster), "--cluster")).check()
    batch = int(str(MODEL["train.global_batch"]))
    cases = {case.name: case for case in all_cases(options.ranks, batch)}
    way = measure_way(options.link)
    predicted = {name: predicted_seconds(case.job, machine, way) for name, case in cases.items()}
    chosen = min(predicted, key=lambda name: predicted[name])
    if options.slower:
        limit = options.slower * predicted[chosen]
        cases = {name: case for name, case in cases.items() if predicted[name] <= limit}
    prepare_embedded(vocabulary=int(str(MODEL["data.vocabulary"])))
    rehearsal = Rehearsal(read(options.kept) if options.kept else [], options.steps, options.patience)
    _visit(rehearsal, list(cases.values()), options.link, options.rounds, options.kept)
    ranked = sorted(rehearsal.found.values(), key=lambda one: one.seconds)
    names = {one.case for one in ranked[: options.closer]} | {chosen}
    if options.rounds:
        _visit(rehearsal, [cases[name] for name in names], options.link, options.rounds + 2, options.kept)
    print(f"{len(predicted)} layouts in all, {len(ranked)} measured")
    print(table(list(rehearsal.found.values()), predicted, chosen))


def _visit(rehearsal: Rehearsal, cases: list[Case], link: str, rounds: int, kept: Path | None) -> None:
    for one in rehearsal.visit_all(cases, [link], rounds):
        if kept:
            write(kept, rehearsal.found.values())
        if sys.stderr.isatty():
            print(f"\r\033[K{one.case}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
