"""ZeRO 3 over all ranks of two hosts, and over the ranks of each host (`layout.shard_group`), on a slow link.

    python benchmarks/links/shard_group.py [--rates 100mbit 30mbit] [--ranks-per-host 2] [--steps 3]
                                      [--rounds 2] [--peers] [--quick]

Two hosts whose link is shaped. All settings train the same model on the same batches in turns, with one or
four micro-batches a rank; a figure is the median over all steps of all rounds. Bytes are what a host sends in
a step, as its eth0 counts. Plain ZeRO 3 gathers all parameters twice for each micro-batch over the link. With
groups the link carries gradients alone: each host sends half of them and returns half. The prediction is
`predict_iteration` with the recipe laptop's cores and the link's rate. ``--peers``: FSDP2 with a 1-D and a
2-D mesh as well. The benchmark checks that Myriad's settings give the same losses.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from myriad.comm.layout import Layout
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second
from peers.data import DataParallel
from peers.myriad_side import Myriad, model_of
from peers.work import Contender, Timing, Work, run_contender

WORK = Work(layers=6, hidden=192, heads=4, vocabulary=1024, sequence=64, global_batch=16)
STAGES = 4
"""Parts that ZeRO 3 gathers one after the other."""


@dataclass
class Setting:
    """One way to train, with its steps so far."""

    name: str
    make: Callable[[Work], Contender]
    layout: dict[str, Any] | None = None
    """Myriad's layout, for the prediction."""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0

    def add(self, timings: list[Timing]) -> None:
        """Add the timings of one round: of each step, the slowest rank counts."""
        self.seconds += [max(each) for each in zip(*(one.seconds for one in timings), strict=True)]
        self.losses = timings[0].losses
        self.sent_bytes = max(one.sent_bytes for one in timings)


def settings_of(world: int, per_host: int, *, peers: bool) -> list[Setting]:
    """Return the settings to compare, each second one with the one before it."""
    found = []
    for count in (1, 4):
        size = WORK.global_batch // world // count
        plain = {"dp": world, "zero": 3, "virtual_stages": STAGES, "micro_batch": size}
        grouped = plain | {"shard_group": per_host}
        found += [
            Setting(
                f"ZeRO 3, {count} micro-batch{'es' if count > 1 else ''}",
                partial(Myriad, layout=plain),
                plain,
            ),
            Setting(f"  shard_group {per_host}", partial(Myriad, layout=grouped), grouped),
        ]
    if peers:
        found += [
            Setting("FSDP2", partial(DataParallel, reshard=True)),
            Setting("  2-D mesh", partial(DataParallel, reshard=True, shard_group=per_host)),
        ]
    return found


def predicted_seconds(layout: dict[str, Any] | None, per_host: int, rate: str, num_cores: int) -> float:
    """Return the predicted seconds of a step on hosts with so many ranks; 0 for a peer."""
    if layout is None:
        return 0.0
    laptop = load_cluster("laptop")
    link = laptop.links.node.model_copy(
        update={
            "bytes_per_second": bits_per_second(rate) / 8 / per_host,
            "latency_seconds": 2e-4,
            "achievable_ratio": 0.95,
            "busy_ratio": 0.1,
        }
    )
    cluster = laptop.model_copy(
        update={
            "nodes": 2,
            "accelerators_per_node": per_host,
            "links": laptop.links.model_copy(update={"network": link}),
            "shared_cores": num_cores,
        }
    )
    workload = Workload(
        model=model_of(WORK), layout=Layout(**layout), global_batch=WORK.global_batch, value_bytes=4
    )
    return predict_iteration(Costs(workload, cluster.check()), spans=False).seconds


def check_losses(settings: list[Setting]) -> None:
    """Refuse settings that train something else."""
    for setting in settings[1:]:
        for one, other in zip(settings[0].losses, setting.losses, strict=True):
            # peers draw other initial values
            if setting.layout is not None and abs(one - other) > 1e-5 * abs(one):
                raise RuntimeError(f"{setting.name}: loss {other} instead of {one}")


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO 3 over all hosts or inside each, on shaped links.")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "30mbit"])
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each round, besides one that warms up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", action="store_true", help="FSDP2 as well")
    parser.add_argument("--quick", action="store_true", help="one rate, one round of one step")
    options = parser.parse_args()
    rates, rounds, steps = options.rates, options.rounds, options.steps
    if options.quick:
        rates, rounds, steps = rates[-1:], 1, 1
    per_host = options.ranks_per_host
    print(f"{WORK.parameters / 1e6:.1f} M parameters, 2 hosts of {per_host} ranks")
    print("| link | setting | ms per step | faster | predicted, ms | faster | MB from a host |")
    print("|---|---|---|---|---|---|---|")
    for rate in rates:
        settings = settings_of(2 * per_host, per_host, peers=options.peers)
        with Hosts(2, rate=rate) as hosts:
            for _ in range(rounds):
                for setting in settings:
                    arguments = (run_contender, setting.make, WORK, steps)
                    setting.add(hosts.run_ranks(*arguments, ranks_per_host=per_host))
            num_cores = len(hosts.cores)
        check_losses(settings)
        for plain, grouped in zip(settings[::2], settings[1::2], strict=True):
            predicted = [predicted_seconds(one.layout, per_host, rate, num_cores) for one in (plain, grouped)]
            for setting, guess in zip((plain, grouped), predicted, strict=True):
                ratio = median(plain.seconds) / median(setting.seconds)
                shown = f"{1e3 * guess:.0f} | {predicted[0] / guess:.2f} x" if guess else "|"
                row = f"| {rate} | {setting.name} | {1e3 * median(setting.seconds):.0f} | {ratio:.2f} x"
                print(f"{row} | {shown} | {setting.sent_bytes / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
