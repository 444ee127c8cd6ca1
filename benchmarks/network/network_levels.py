"""Whether the levels of the network's model agree: the same scenario as flow, as fluid and packet by packet.

    python benchmarks/network/network_levels.py [--scenario incast,victim] [--seeds 4] [--payload 4096]

A row is a control in a scenario: time till the last flow is done as a share of what max-min fair shares (the
flow level) would take, by the fluid and by packets, and their quotient; the same for packets without headers,
which the fluid does not have; median queues. Each is the mean of the seeds, with the range of the packets':
marks are drawn, and DCQCN makes much of which flow gets them (controls that do not look at marks run once).
Where the quotient is more than 5 % from 1, the row says so.

A fluid has no packets: `--payload 1000`, as HPCC's simulator has it, says how much of a difference goes with
their size.
"""

import argparse

import numpy as np

from myriad.network.congestion_controls import CONTROLS, Dcqcn, Hybrid, control
from myriad.network.congestion_scenarios import SCENARIOS, CongestionScenario, scenario, settings_for
from myriad.network.fluid.fluid_engine import simulate_fluid
from myriad.network.packets.packet_engine import simulate_packets
from myriad.network.packets.packet_problem import Transport

AGREE = 0.05


def fluid(case: CongestionScenario, name: str, seed: int) -> tuple[float, float]:
    """Seconds and median queue in bytes."""
    law = control(name)
    found = simulate_fluid(
        case.fabric, case.flows, case.paths, law, settings_for(law, case.fabric, case.paths),
        horizon_seconds=1.0, start_packets=case.start_packets, seed=seed,
    )  # fmt: skip
    return float(found.finish_seconds.max()), float(np.median(found.queue_bytes))


def packets(case: CongestionScenario, name: str, seed: int, transport: Transport) -> tuple[float, float]:
    """The same."""
    law = control(name)
    found = simulate_packets(
        case.fabric, case.flows, case.paths, law, settings_for(law, case.fabric, case.paths),
        seed=seed, transport=transport, start_packets=case.start_packets,
    )  # fmt: skip
    switches = case.fabric.tier[case.fabric.source] > 0
    return float(found.finish_seconds.max()), float(found.queue_p50_bytes[switches].max())


def row(case: CongestionScenario, name: str, seeds: int, payload: int) -> str:
    """One line."""
    fair = float(case.fair_seconds().max())
    seeds = seeds if isinstance(control(name), Dcqcn | Hybrid) else 1
    with_headers, bare = Transport(payload_bytes=payload), Transport(payload_bytes=payload, header_bytes=0)
    as_fluid, as_packets, as_bare = (
        np.array([run(seed) for seed in range(seeds)])
        for run in (
            lambda seed: fluid(case, name, seed),
            lambda seed: packets(case, name, seed, with_headers),
            lambda seed: packets(case, name, seed, bare),
        )
    )
    shares = [fair / found[:, 0] for found in (as_fluid, as_packets, as_bare)]
    means = [share.mean() for share in shares]
    both, bare_both = means[1] / means[0], means[2] / means[0]
    queues = [found[:, 1].mean() / 1e3 for found in (as_fluid, as_packets)]
    told = "" if abs(both - 1) <= AGREE else "  apart"
    return (
        f"{case.name:<12} {name:<20} {means[0]:>6.1%} {means[1]:>8.1%} {shares[1].min():>7.1%}"
        f" {shares[1].max():>6.1%} {both:>7.3f} {bare_both:>8.3f}"
        f" {queues[0]:>9,.0f} {queues[1]:>8,.0f}{told}"
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scenario", default=",".join(SCENARIOS))
    parser.add_argument("--control", default=",".join(CONTROLS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--payload", type=int, default=Transport().payload_bytes, help="bytes of a packet")
    given = parser.parse_args()
    print(f"{'':<33} {'share of fair rates':^30} {'packet / fluid':^16} {'median queue, kB':^18}")
    print(
        f"{'':<12} {'':<20} {'fluid':>6} {'packet':>8} {'from':>7} {'to':>6} {'':>7} {'bare':>8}"
        f" {'fluid':>9} {'packet':>8}"
    )
    for name in given.scenario.split(","):
        case = scenario(name)
        for law in given.control.split(","):
            print(row(case, law, given.seeds, given.payload), flush=True)


if __name__ == "__main__":
    main()
