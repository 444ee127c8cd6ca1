"""veGiantModel's experiment: what its article claims, what the planner predicts, what real processes show.

    python benchmarks/links/vegiant_table.py                                 claims and predictions, 40 s
    python benchmarks/links/vegiant_table.py --measure Myriad --kept FILE    one contender on links, as root
    python benchmarks/links/vegiant_table.py --kept FILE                     and the measurements beside them
    python benchmarks/links/vegiant_table.py --json                          everything as JSON

GPT-13B, sequence 256, batch 1536, four machines of eight GPUs: V100 32 GB with 100 Gb/s, A100 40 GB with 800
Gb/s, each over RDMA and over TCP. The contenders are what the article names, as those releases were:

    Megatron     v2.4, tensor 4, pipeline 4, so 2 replicas; its best micro-batch and checkpointing of those
                 that fit, and those of its examples (`--micro-batch-size 4 --checkpoint-activations`)
    DeepSpeed    v0.4.2, ZeRO 3 with the keys of DeepSpeedExamples, activations checkpointed. The article
                 names no micro-batch, and ZeRO 3 gathers and reduces all parameters for each. 1x48: the batch
                 in one, as the example's "gradient_accumulation_steps": 1 says; 12x4: the example script's
                 BATCHSIZE of 4; 3x16: its 4 x 1,024 tokens
    Myriad       the best plan for the environment

"one port": TCP where NCCL finds a single interface for its sockets. Which of the two the article's A100 had
is not known; on V100, with one port a machine, there is no difference.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from myriad.comm.layout import Layout
from myriad.forecasts.planned_job import problem_of
from myriad.job import Job, load_job_to_plan
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.frameworks import Framework
from myriad.planner.search.layout_search import search_layouts
from myriad.planner.search.plan_ranking import simulate_candidates
from myriad.planner.search.planning import describe_layout
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.prediction_errors import probability_of_fit
from myriad.planner.validation.published_systems import DEEPSPEED_0_4_2, MEGATRON_2_4
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster

TCP = ("nics.transport=tcp",)
ONE_PORT = (*TCP, "nics.socket_ports=1")
V100, A100 = "vegiant-32xv100-100g", "vegiant-32xa100-800g"
V100_TCP, A100_TCP, ONE = "V100 TCP", "A100 TCP", "A100 TCP, one port"
ENVIRONMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "V100 RDMA": (V100, ()),
    V100_TCP: (V100, TCP),
    "A100 RDMA": (A100, ()),
    A100_TCP: (A100, TCP),
    ONE: (A100, ONE_PORT),
}
MEGATRON, EXAMPLE, MYRIAD = "Megatron", "Megatron's example", "Myriad"
ZERO = {f"ZeRO-3 {48 // size}x{size}": size for size in (48, 16, 4)}
"""Micro-batches by name: so many of so many sequences."""
_NO_NETWORK = ("links.network.bytes_per_second=1e17", "links.network.latency_seconds=1e-9")
_MOST_RATIO = 15.0
"""Seconds of bytes for one of compute, above which a step here takes too long to be visited."""


@dataclass(frozen=True)
class Line:
    """One contender in one environment, predicted."""

    environment: str
    system: str
    layout: str
    fits: float
    """Probability that its memory does."""
    seconds: float
    samples_per_second: float
    rdma_seconds: float
    """Seconds of a step of the same layout on the same machines over RDMA."""
    ratio: float
    """Seconds of its bytes on a machine's NICs for one of compute, if nothing hid them; of Myriad those of
    the pipeline that is measured, whatever the plan is."""
    slowdown: float
    """Its seconds for one second without a network, of the same."""


def predicted(job: Job) -> Iterator[Line]:
    """Every environment and contender."""
    simulations = SimulationCache()
    for environment, (name, changes) in ENVIRONMENTS.items():
        cluster, rdma = load_cluster(name, changes), load_cluster(name)
        free = load_cluster(name, _NO_NETWORK)
        megatron = min(_megatron(job, cluster), key=simulations.seconds)
        example = Layout(dp=2, tp=4, pp=4, micro_batch=4, recompute="full")
        chosen = {MEGATRON: megatron, EXAMPLE: _costs(job, cluster, MEGATRON_2_4, example)}
        for words, size in ZERO.items():
            chosen[words] = _costs(job, cluster, DEEPSPEED_0_4_2, _zero_layout(size))
        for system, costs in chosen.items():
            each = [simulations.seconds(Costs(costs.workload, one)) for one in (cluster, rdma, free)]
            yield _line(environment, system, costs, *each)
        yield _best_plan(environment, job, (cluster, rdma, free), simulations)


def _zero_layout(micro_batch: int) -> Layout:
    return Layout(dp=32, zero=3, micro_batch=micro_batch, recompute="full", reduce="each")


def _megatron(job: Job, cluster: Cluster) -> Iterator[Costs]:
    """Those of its micro-batches and checkpointing that fit more likely than not."""
    for recompute in ("none", "full"):
        for micro_batch in (1, 2, 4, 8, 16, 32):
            layout = Layout(dp=2, tp=4, pp=4, micro_batch=micro_batch, recompute=recompute)
            costs = _costs(job, cluster, MEGATRON_2_4, layout)
            if probability_of_fit(costs.workload, cluster) > 0.5:
                yield costs


def _costs(job: Job, cluster: Cluster, system: Framework, layout: Layout) -> Costs:
    work = Workload(job.model, layout, job.train.global_batch, overlap=system.overlap, profile=system.profile)
    return Costs(work, cluster)


def _line(
    environment: str, system: str, costs: Costs, seconds: float, rdma_seconds: float, compute: float
) -> Line:
    work, layout = costs.workload, costs.workload.layout
    words = f"dp {layout.dp} tp {layout.tp} pp {layout.pp}, micro-batch {layout.micro_batch}"
    words += ", checkpointed" if layout.recompute == "full" else ""
    ratio = _sent_bytes(work) / _machine_rate(costs.cluster) / compute
    samples = work.global_batch / seconds
    slowdown = seconds / compute
    return Line(
        environment,
        system,
        words,
        probability_of_fit(costs.workload, costs.cluster),
        seconds,
        samples,
        rdma_seconds,
        ratio,
        slowdown,
    )


def _sent_bytes(work: Workload) -> float:
    """Return the bytes that a machine sends in a step.

    ZeRO 3 gathers all parameters twice and reduces them once for each micro-batch, in a ring that leaves each
    machine once. A pipeline with a stage or more in each machine sends the activations of all tokens one way
    and their gradients the other."""
    model, layout = work.model, work.layout
    if layout.zero == 3:
        each = 2 * work.value_bytes + work.profile.gradient_bytes
        return work.num_micro_batches * each * float(model.num_parameters()) * (1 - 1 / layout.dp)
    return 2.0 * work.global_batch * model.sequence * model.hidden * work.value_bytes


def _machine_rate(cluster: Cluster) -> float:
    link = cluster.link("network")
    return link.bytes_per_second * cluster.ratio("network") * cluster.accelerators_per_node


def _best_plan(
    environment: str, job: Job, clusters: tuple[Cluster, Cluster, Cluster], simulations: SimulationCache
) -> Line:
    """And the ratio of the layout that is measured: a pipeline across machines."""
    cluster, rdma, free = clusters
    problem = problem_of(job, cluster)
    plan = simulate_candidates(problem, search_layouts(problem, count=30).best, simulations)[0]
    pipeline = Layout(dp=1, tp=4, pp=8, schedule="zero-bubble", micro_batch=16)
    work = Workload(job.model, pipeline, problem.global_batch, overlap=job.overlap)
    compute = simulations.seconds(Costs(work, free))
    ratio = _sent_bytes(work) / _machine_rate(cluster) / compute
    samples, seconds = problem.global_batch / plan.seconds, plan.seconds
    again = simulations.seconds(Costs(plan.candidate.workload(problem), rdma))
    words = describe_layout(plan.candidate)
    slowdown = simulations.seconds(Costs(work, cluster)) / compute
    fits = plan.candidate.fit_probability
    return Line(environment, MYRIAD, words, fits, seconds, samples, again, ratio, slowdown)


# tables


def print_predictions(lines: Sequence[Line]) -> None:
    """One row for each environment; `--json` has layouts, memory and ratios."""
    others = [one for one in dict.fromkeys(line.system for line in lines) if one != MYRIAD]
    print("Predicted samples/s, and in brackets how many times quicker Myriad's plan is\n")
    print(f"| environment | {' | '.join(others)} | Myriad | its plan |")
    print("|---" * (len(others) + 3) + "|")
    for environment in ENVIRONMENTS:
        best = _one(lines, environment, MYRIAD)
        rates = [_one(lines, environment, one).samples_per_second for one in others]
        cells = [f"{rate:.1f} ({best.samples_per_second / rate:.2f})" for rate in rates]
        print(f"| {environment} | {' | '.join(cells)} | {best.samples_per_second:.1f} | {best.layout} |")


def _one(lines: Sequence[Line], environment: str, system: str) -> Line:
    return next(one for one in lines if (one.environment, one.system) == (environment, system))


def print_measured(lines: Sequence[Line], visits: Sequence[dict[str, Any]]) -> None:
    """One row for each environment and contender that was visited."""
    print("\nMeasured at the same ratio of bytes to compute; slowdown: a step over one without a network\n")
    print(
        "| environment | contender | bytes / compute | Mbit/s | s/step | slowdown | predicted | Myriad / it |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for visit in visits:
        where, who, seconds = visit["environment"], visit["contender"], visit["seconds"]
        own = [v for v in visits if v["contender"] == MYRIAD and v["environment"] == where]
        faster = f"{seconds / own[0]['seconds']:.2f}" if own and who != MYRIAD else ""
        there = [line.slowdown for line in lines if (line.environment, line.system) == (where, who)]
        print(
            f"| {where} | {who} | {visit['ratio']:.2f} | {visit['bits_per_second'] / 1e6:.0f} |"
            f" {seconds:.2f} | {seconds / visit['unshaped_seconds']:.2f} | {there[0]:.2f} | {faster} |"
        )


CLAIMS = (
    "up to 6.9 x the others",
    "1.2 to 3.5 x the others",
    "RDMA to TCP costs under 10 %",
    "ZeRO loses nearly 5 x",
)


def print_claims(lines: Sequence[Line], visits: Sequence[dict[str, Any]]) -> None:
    """The article's claims beside both."""
    predictions = {(one.environment, one.system): one.seconds for one in lines}
    measured = {(one["environment"], one["contender"]): float(one["seconds"]) for one in visits}
    print("\nMyriad over each, most and range; loss by TCP on V100, A100; in brackets: one port")
    print("\n| the article claims | predicted | measured here |\n|---|---|---|")
    columns = [_answers(predictions), _answers(measured)]
    layouts = max(line.seconds / line.rdma_seconds - 1 for line in lines if line.system == MYRIAD)
    columns[0][2] += f"; Myriad with one layout for both, at most {layouts:.0%}"
    for claim, prediction, measurement in zip(CLAIMS, *columns, strict=True):
        print(f"| {claim} | {prediction} | {measurement} |")


def _answers(seconds: dict[tuple[str, str], float]) -> list[str]:
    """Return the answer to each claim, from the step seconds of contenders (one port in brackets)."""
    faster = {
        (where, who): own / seconds[where, MYRIAD]
        for (where, who), own in seconds.items()
        if who != MYRIAD and (where, MYRIAD) in seconds
    }
    names = [who for who in dict.fromkeys(who for _, who in seconds) if who != MYRIAD]
    compared = [who for who in names if any(one == who for _, one in faster)]
    zero = [who for who in names if who.startswith("ZeRO")]
    loss = {
        (where, who): own / seconds[rdma, who]
        for (where, who), own in seconds.items()
        if "TCP" in where and (rdma := f"{where.split()[0]} RDMA", who) in seconds
    }
    losses = [who for who in (MYRIAD, *names) if not who.startswith("ZeRO")]
    return [
        "; ".join(f"{who} {_most(faster, who)}" for who in compared),
        "; ".join(f"{who} {_span([v for (at, one), v in faster.items() if one == who])}" for who in compared),
        "; ".join(f"{who} {_percent(loss, who)}" for who in losses if (A100_TCP, who) in loss),
        "; ".join(f"{who} {_most(loss, who)} x" for who in zero if (A100_TCP, who) in loss),
    ]


def _most(found: dict[tuple[str, str], float], who: str) -> str:
    """The most of all environments, and in brackets through one port."""
    usual = max((v for (where, one), v in found.items() if one == who and where != ONE), default=math.nan)
    through_one = found.get((ONE, who))
    return f"{usual:.1f}" + ("" if through_one is None else f" ({through_one:.1f})")


def _percent(loss: dict[tuple[str, str], float], who: str) -> str:
    """Return the loss on V100, on A100, and in brackets on A100 through one port."""
    usual = [f"{loss[where, who] - 1:.0%}" for where in (V100_TCP, A100_TCP) if (where, who) in loss]
    return ", ".join(usual) + (f" ({loss[ONE, who] - 1:.0%})" if (ONE, who) in loss else "")


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    names = (*ZERO, MEGATRON, MYRIAD)
    parser.add_argument("--measure", nargs="+", default=[], choices=names, help="visit the links, needs root")
    parser.add_argument("--only", nargs="+", default=[""], help="with --measure: environments that begin so")
    parser.add_argument(
        "--rounds", type=int, default=4, help="with --measure: visits to each environment (4)"
    )
    parser.add_argument("--kept", type=Path, help="file of measurements, read and with --measure added to")
    chosen = parser.parse_args(arguments)
    visits = json.loads(chosen.kept.read_text()) if chosen.kept and chosen.kept.exists() else []
    lines = list(predicted(load_job_to_plan("gpt-13b")))
    for system in chosen.measure:
        visits = _measured(system, chosen, lines, visits)
    if chosen.json:
        print(json.dumps({"predicted": [asdict(line) for line in lines], "measured": visits}))
        return
    print_predictions(lines)
    if visits:
        print_measured(lines, visits)
    print_claims(lines, visits)


def _measured(system: str, chosen: argparse.Namespace, lines: Sequence[Line], visits: list[Any]) -> list[Any]:
    """Return all visits with those of one contender anew, and keep them."""
    from vegiant_links import measure

    ratios = [
        (line.environment, line.ratio)
        for line in lines
        if line.system == system
        and line.ratio <= _MOST_RATIO
        and any(line.environment.startswith(start) for start in chosen.only)
    ]
    found = [asdict(visit) for visit in measure(system, ratios, chosen.rounds)]
    again = {(one["environment"], one["contender"]) for one in found}
    visits = [one for one in visits if (one["environment"], one["contender"]) not in again] + found
    if chosen.kept:
        chosen.kept.write_text(json.dumps(visits, indent=1) + "\n")
    return visits


if __name__ == "__main__":
    main(sys.argv[1:])
