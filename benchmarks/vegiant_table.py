"""veGiantModel's experiment, predicted: GPT-13B on 4 machines of 8 GPUs, three strategies, four networks.

    python benchmarks/vegiant_table.py [--json]

Its article shows the results as a picture only, and does not name the accelerators: these figures are
predictions, for the clusters that are assumed (`vegiant-32xv100-100g`, `vegiant-32xa100-800g`). Each strategy
gets its best micro-batch and recomputation of those that fit, as its users would look for them.

    Megatron       tp 8 in a machine, 4 replicas; every collective is waited for, gradients at the end
    DeepSpeed      ZeRO-3 over all 32, parameters gathered and gradients reduced behind the compute
    veGiantModel   tensor, pipeline and data parallelism together, everything overlapped: the best of all
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from myriad.cli.plan_job import problem_of
from myriad.job import load_job_to_plan
from myriad.planner.judge import judge, judge_plot
from myriad.planner.questions import describe
from myriad.planner.rescore import Plan, rescore
from myriad.planner.search import search
from myriad.planner.space import Candidate, Problem, plots
from myriad.planner.stage_times import LayerTable
from myriad.recipes.cluster import load_cluster

NETWORKS = {"100 Gb/s": "vegiant-32xv100-100g", "800 Gb/s": "vegiant-32xa100-800g"}
OVER_TCP = ("links.network.achievable_ratio=0.5", "links.network.latency_seconds=50e-6")
"""Assumed: sockets are copied by processors, and reach half of such a link."""
MEGATRON, DEEPSPEED, VEGIANT = "Megatron (tp 8, dp 4)", "DeepSpeed (ZeRO-3, dp 32)", "veGiantModel (3D)"


@dataclass(frozen=True)
class Line:
    system: str
    network: str
    layout: str
    seconds: float | None
    samples_per_second: float | None


def plan_of(system: str, problem: Problem) -> Plan | None:
    """The system's strategy at its best; none where nothing fits."""
    if system == VEGIANT:
        plans = rescore(problem, search(problem, count=30).best)
        return plans[0] if plans else None
    return next(iter(rescore(problem, quickest(system, problem))), None)


def quickest(system: str, problem: Problem) -> Iterator[Candidate]:
    """Ten of every micro-batch and recomputation that fit; of ZeRO-3 also of every number of pieces that are
    gathered at a time."""
    tp, zero = (8, 0) if system == MEGATRON else (1, 3)
    plot = next(plot for plot in plots(problem) if (plot.tp, plot.pp) == (tp, 1))
    table = LayerTable(problem)
    seconds, _, fits = judge_plot(plot, table)
    data, optimizer = (True, False) if system == DEEPSPEED else (False, False)
    place = (-1, 0, plot.switches.index((data, optimizer)))  # overlap.tensor off where there is any
    wanted = np.array([shard == zero for shard, _ in plot.shards])[None, None, :, None]
    pieces = np.array([zero == 3 or stages == 1 for _, stages in plot.schedules])[None, :, None, None]
    ranked = np.where(fits & wanted & pieces, seconds[(..., *place)], np.inf)
    for flat in np.argsort(ranked, axis=None)[:10]:
        index = np.unravel_index(flat, ranked.shape)
        if np.isfinite(ranked[index]):
            layout, overlap = plot.at((*(int(one) for one in index), len(plot.tensors) - 1, 0, place[2]))
            yield judge(problem, Candidate(layout, overlap, 0.0, 0.0, 0.0), table)


def lines() -> Iterator[Line]:
    job = load_job_to_plan("gpt-13b")
    for rate, cluster in NETWORKS.items():
        for transport, changes in (("TCP", OVER_TCP), ("RDMA", ())):
            problem = problem_of(job, load_cluster(cluster, changes))
            for system in (MEGATRON, DEEPSPEED, VEGIANT):
                plan, network = plan_of(system, problem), f"{transport} {rate}"
                if plan is None:
                    yield Line(system, network, "nothing fits", None, None)
                    continue
                words = describe(plan.candidate)
                yield Line(system, network, words, plan.seconds, problem.global_batch / plan.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = list(lines())
    if as_json:
        print(json.dumps([vars(line) for line in found]))
        return
    print("PREDICTIONS: GPT-13B, sequence 256, batch 1536, 4 machines x 8 (100 Gb/s: V100, 800: A100)\n")
    print("| network | system | samples/s | s/iteration | of the best | layout |\n|---|---|---|---|---|---|")
    for line in found:
        best = max(one.samples_per_second or 0.0 for one in found if one.network == line.network)
        if line.seconds is None or line.samples_per_second is None:
            print(f"| {line.network} | {line.system} | | | | {line.layout} |")
            continue
        share, rate = line.samples_per_second / best, line.samples_per_second
        figures = f"{rate:.1f} | {line.seconds:.1f} | {share:.0%}"
        print(f"| {line.network} | {line.system} | {figures} | {line.layout} |")


if __name__ == "__main__":
    main()
