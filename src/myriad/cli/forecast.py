"""``myriad simulate --cluster``: one iteration on a cluster, predicted; as table, picture, spans or JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.cli.bars import Counted, count_bar
from myriad.cli.files import write_picture
from myriad.cli.forecast_network import NetworkEffect, WantedNetwork
from myriad.cli.json_output import print_json
from myriad.errors import BadInputError
from myriad.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.planner.cluster import Cluster
    from myriad.planner.costs import Costs
    from myriad.planner.fabric_outlook import FabricOutlook
    from myriad.planner.network_events import NetworkEvents
    from myriad.planner.outlook import Outlook, RankOutlook
    from myriad.planner.work import Work
    from myriad.telemetry.spans import Span
from myriad.units import format_number

__all__ = ["Wanted", "costs_of", "forecast", "nodes_of", "predict_step"]

_MOST_ROWS = 32
_MOST_JITTER = 0.5


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    job: str
    overrides: Sequence[str]
    cluster: str
    out: Path | None
    spans: Path | None
    full: bool
    stragglers: Sequence[str]
    jitter: float
    seed: int
    network: WantedNetwork
    fabric: bool
    as_json: bool


def forecast(wanted: Wanted) -> None:
    """Predicts, writes and prints. Raises `BadInputError`."""
    from myriad.cli.measure import cluster_path
    from myriad.job import load_job
    from myriad.recipes.cluster import load_cluster

    if not 0 <= wanted.jitter <= _MOST_JITTER:
        raise BadInputError("--jitter", wanted.jitter, f"0 to {_MOST_JITTER}: a share of each compute's time")
    job, cluster = load_job(wanted.job, wanted.overrides), load_cluster(cluster_path(wanted.cluster))
    _check_place(job, cluster)
    if wanted.spans is not None:
        _check_folder(wanted.spans)
    with count_bar("simulating an iteration") as show:
        found, ranks, effect = _predict(wanted, job, cluster)
        on_fabric = _on_fabric(wanted, job, cluster, show) if wanted.fabric else None
    written = _write(wanted, job, cluster, found, ranks)
    if wanted.as_json:
        network = {} if effect is None else {"network": effect.as_json()}
        fabric = {} if on_fabric is None else {"fabric": on_fabric.as_json()}
        print_json(_as_json(job, cluster, found, written) | network | fabric)
    else:
        lines = [] if effect is None else list(effect.lines(found))
        lines += [] if on_fabric is None else [_fabric_line(on_fabric)]
        _print(job, cluster, found, written, lines)


def predict_step(name: str, overrides: Sequence[str], cluster: "Cluster") -> tuple["Job", float]:
    """A job, and the seconds of an iteration of it on a cluster. Raises `BadInputError`."""
    from myriad.job import load_job
    from myriad.planner.simulator import simulate

    job = load_job(name, overrides)
    prediction = simulate(costs_of(job, cluster), slower={}, jitter=0.0, seed=1)
    return job, prediction.seconds


def costs_of(job: "Job", cluster: "Cluster") -> "Costs":
    """What a job's actions cost on a cluster. Raises `BadInputError` where it has no room."""
    from myriad.planner.costs import Costs

    _check_place(job, cluster)
    return Costs(_work_of(job, cluster), cluster)


def _check_place(job: "Job", cluster: "Cluster") -> None:
    if job.layout.world > cluster.world:
        allowed = f"at most the {cluster.world:,} accelerators of {cluster.name}"
        raise BadInputError("layout.dp x layout.tp x layout.pp", job.layout.world, allowed)


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError("--spans", str(folder), "must be a new or empty folder")


def _predict(
    wanted: Wanted, job: "Job", cluster: "Cluster"
) -> "tuple[Outlook, Mapping[int, list[Span]], NetworkEffect | None]":
    from myriad.planner.costs import Costs
    from myriad.planner.memory import fits_probability
    from myriad.planner.outlook import outlook
    from myriad.planner.predicted_spans import predicted_spans
    from myriad.planner.rank_memory import memory_of_ranks
    from myriad.planner.simulator import simulate

    slower, events = _disturbed(wanted, job, cluster)
    costs = Costs(_work_of(job, cluster), cluster)
    given = partial(simulate, costs, slower=slower, jitter=wanted.jitter, seed=wanted.seed)
    prediction = given(every_replica=wanted.full, network=events)
    memory = memory_of_ranks(costs.work, prediction.program, on_cpu=cluster.on_cpu)
    capacity = float(cluster.accelerator.memory_bytes)
    fits = [float(fits_probability(one, capacity)) for one in memory]
    effect = None
    if events is not None:
        effect = NetworkEffect(events, prediction.seconds, given(spans=False).seconds)
    return outlook(costs, prediction, memory, fits), predicted_spans(prediction, job.layout), effect


def _on_fabric(wanted: Wanted, job: "Job", cluster: "Cluster", show: Counted) -> "FabricOutlook":
    """Of the nodes in the job's own order, under draws of the hashes."""
    from myriad.planner.fabric_outlook import OnFabric
    from myriad.planner.rescore import Simulations
    from myriad.planner.simulator import simulate

    slower, events = _disturbed(wanted, job, cluster)
    given = partial(simulate, slower=slower, jitter=wanted.jitter, seed=wanted.seed, spans=False)

    def disturbed(costs: "Costs") -> float:
        return given(costs, network=events).seconds

    judge = disturbed if slower or wanted.jitter or events else Simulations().without_saves
    on_fabric = OnFabric(cluster, judge, first_seed=wanted.seed)
    return on_fabric.outlook(
        on_fabric.tenant(costs_of(job, cluster)),
        nodes_of(job, cluster),
        progress=partial(show, "simulating draws of the hashes"),
    )


def _disturbed(
    wanted: Wanted, job: "Job", cluster: "Cluster"
) -> "tuple[dict[tuple[int, int], float], NetworkEvents | None]":
    """Ranks that compute slowly, and what happens to links, on the nodes that the job has."""
    from myriad.planner.stragglers import slower_lanes

    order = nodes_of(job, cluster)
    slower = slower_lanes(wanted.stragglers, job.layout, cluster.accelerators_per_node, order)
    return slower, wanted.network.events(job, cluster, order)


def nodes_of(job: "Job", cluster: "Cluster") -> Sequence[int] | None:
    """In the job's own order, where it has one."""
    order = job.comm.node_order
    if order is None:
        return None
    if len(order) * cluster.accelerators_per_node != job.layout.world or len(order) > cluster.nodes:
        allowed = f"nodes of {cluster.name}, with {cluster.accelerators_per_node} ranks each"
        raise BadInputError("comm.node_order", f"{len(order)} nodes", allowed)
    return order


def _work_of(job: "Job", cluster: "Cluster") -> "Work":
    from myriad.cli.plan_job import planned_precision, practice_of, saves_of
    from myriad.job import work_of
    from myriad.planner.budget import layout_within

    value_bytes = 4 if planned_precision(job, cluster) == "float32" else 2
    practice = replace(practice_of(job), cuda_graphs=job.train.cuda_graphs)
    work = replace(work_of(job, value_bytes), saves=saves_of(job), practice=practice)
    if job.train.memory_budget is None:
        return work
    layout = layout_within(work, job.train.memory_budget, on_cpu=cluster.on_cpu)
    return replace(work, layout=layout)


def _write(
    wanted: Wanted, job: "Job", cluster: "Cluster", found: "Outlook", ranks: "Mapping[int, list[Span]]"
) -> list[Path]:
    from myriad.job import dump_toml
    from myriad.telemetry.draw import Lane, Panel, draw_spans
    from myriad.telemetry.span_table import write_spans

    written = []
    if wanted.out is not None:
        lanes = [Lane(f"rank {rank}", spans) for rank, spans in ranks.items()]
        panel = Panel("one iteration, predicted", 0.0, found.seconds, lanes)
        write_picture("--out", wanted.out, draw_spans(_headline(job, cluster, found), [panel]))
        written.append(wanted.out)
    if wanted.spans is not None:
        folder = wanted.spans / "spans"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_spans(folder / "step-1.parquet", ranks, step=1)
            write_whole(wanted.spans / "job.toml", dump_toml(job))
        except OSError as error:
            raise BadInputError(
                "--spans", str(wanted.spans), f"cannot be written: {error.strerror}"
            ) from None
        written.append(wanted.spans)
    return written


def _headline(job: "Job", cluster: "Cluster", found: "Outlook") -> str:
    time = f"{_seconds(found.seconds)} an iteration, MFU {found.mfu:.1%}"
    return f"{job.name} on {found.world:,} of {cluster.world:,} accelerators of {cluster.name}: {time}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _print(
    job: "Job", cluster: "Cluster", found: "Outlook", written: Sequence[Path], network: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.text import Text

    from myriad.cli.plan_job import planned_precision
    from myriad.planner.interval import promise

    console = Console(highlight=False)
    console.print(Text(_headline(job, cluster, found), style="bold"), soft_wrap=True)
    peak = f"{format_number(found.peak_flops_per_second / 1e12, 4)} TFLOP/s, {cluster.accelerator.name}"
    peak += f" in {planned_precision(job, cluster)}"
    console.print(f"{found.tokens_per_second:,.0f} tokens/s; MFU of {peak}", soft_wrap=True)
    head, *rows = _table(found)
    console.print(Text(head, style="bold"), soft_wrap=True)
    for row in rows:
        console.print(Text(row), soft_wrap=True)
    if (hidden := len(found.ranks) - _MOST_ROWS) > 0:
        console.print(f"and {hidden:,} more: --json has all")
    note = f"bubble {found.bubble_ratio:.1%}, in which a rank waits for other stages or their messages;"
    note += f" other communication that nothing hides: {_others(found):.1%}. Nothing was run."
    console.print(Text(note, style="dim"), soft_wrap=True)
    if found.stall_seconds:
        stall = f"snapshots add {_seconds(found.stall_seconds)} to an iteration, on average over steps"
        console.print(Text(stall, style="dim"), soft_wrap=True)
    if said := promise(cluster):
        console.print(Text(said, style="dim"), soft_wrap=True)
    for line in network:
        console.print(Text(line), soft_wrap=True)
    for path in written:
        console.print(str(path), soft_wrap=True)


def _fabric_line(one: "FabricOutlook") -> str:
    line = f"on its switches, {len(one.seconds)} draws of their hashes: p50 {_seconds(one.p50)}, "
    return line + f"p95 {_seconds(one.p95)}; the slowest ring at {one.ring:.2f} of its ports' rate"


def _others(found: "Outlook") -> float:
    """Share of the time."""
    from myriad.planner.outlook import EXPOSED

    return sum(found.mean(name) for name in EXPOSED if name != "pipeline") / found.seconds


def _table(found: "Outlook") -> list[str]:
    """A line for each rank; kinds of communication that nobody waits for are left out."""
    from myriad.planner.outlook import EXPOSED
    from myriad.units import format_bytes

    kinds = [name for name in EXPOSED if any(one.exposed_seconds[name] for one in found.ranks)]
    rows = [["rank", "replicas", "computes", "updates", *kinds, "memory", "fits"]]
    for one in found.ranks[:_MOST_ROWS]:
        shares = (one.computing_seconds, one.optimizer_seconds, *(one.exposed_seconds[k] for k in kinds))
        cells = [f"{share / found.seconds:.1%}" for share in shares]
        memory = format_bytes(int(float(one.memory.total)))
        rows.append([str(one.rank), _replicas(one), *cells, memory, f"{one.fits:.0%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _replicas(one: "RankOutlook") -> str:
    if one.replica >= 0:
        return f"no. {one.replica}"
    return f"{one.num_replicas:,}"


def _as_json(job: "Job", cluster: "Cluster", found: "Outlook", written: Sequence[Path]) -> dict[str, Any]:
    from myriad.cli.plan_job import planned_precision
    from myriad.planner.interval import interval_ratio
    from myriad.planner.outlook import EXPOSED

    return {
        "job": job.name,
        "cluster": cluster.name,
        "precision": planned_precision(job, cluster),
        "accelerators": found.world,
        "iteration_seconds": found.seconds,
        "interval_ratio": interval_ratio(cluster),
        "mfu": found.mfu,
        "peak_flops_per_second": found.peak_flops_per_second,
        "tokens_per_second": found.tokens_per_second,
        "bubble_ratio": found.bubble_ratio,
        "checkpoint_stall_seconds": found.stall_seconds,
        "checkpoint_store_seconds": found.store_seconds,
        "exposed_seconds": {name: found.mean(name) for name in EXPOSED},
        "ranks": [_rank_as_json(one) for one in found.ranks],
        "written": [str(path) for path in written],
    }


def _rank_as_json(one: "RankOutlook") -> dict[str, Any]:
    memory = {f"{name}_bytes": float(value) for name, value in vars(one.memory).items()}
    return {
        "replica": None if one.replica < 0 else one.replica,
        "num_replicas": one.num_replicas,
        "pipeline_rank": one.rank,
        "computing_seconds": one.computing_seconds,
        "optimizer_seconds": one.optimizer_seconds,
        "exposed_seconds": dict(one.exposed_seconds),
        "memory_bytes": float(one.memory.total),
        "memory": memory,
        "fits_probability": one.fits,
    }
