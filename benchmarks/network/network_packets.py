"""How fast the packet level is, and htsim beside it on the same incast.

    python benchmarks/network/network_packets.py [--htsim FOLDER] [--repeats 5]

The fabric is a fat tree of 128 hosts and 80 switches with 8 ports (all-to-all and pairs: 256 hosts under
two tiers), 400 Gbit/s and 1 us a link. Seconds are of the best repeat, with everything that a call does;
before it one small simulation loads the compiled loop. An event is what `packets.event_loop` says.

FOLDER holds `htsim_roce` and `htsim_hpcc` as built from github.com/Broadcom/csg-htsim (sim/datacenter). They
get the same hosts, flows, packets, pause thresholds and latencies. htsim does not say how many events it had,
so packets x links per second is what both have in common. Its acknowledgements are packets in queues too,
ours are not; its time has the start of a process in it.
"""

import argparse
import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from myriad.network.config import FabricShape
from myriad.network.congestion_controls import CONTROLS, Control, SwitchSettings
from myriad.network.fabric import Fabric, Flows, Paths
from myriad.network.fabric_builder import build
from myriad.network.packets.packet_engine import simulate_packets
from myriad.network.packets.packet_problem import Transport
from myriad.network.routing import Routes, ecmp

RATE = 50e9
WIRE = 4096 + Transport().header_bytes
LOW, HIGH = 12, 60
"""Pause thresholds in packets, for both."""


@dataclass(frozen=True)
class Case:
    """A fabric and what goes over it."""

    name: str
    fabric: Fabric
    flows: Flows
    paths: Paths

    @property
    def num_packet_hops(self) -> float:
        """Each packet times its links."""
        return float(np.sum(np.ceil(self.flows.num_bytes / 4096) * np.diff(self.paths.first)))


def tree(num_hosts: int) -> Fabric:
    """Three tiers of 8-port switches, or two with 16 hosts each."""
    if num_hosts == 128:
        shape = FabricShape(kind="clos3", ports_per_switch=8, nodes_per_switch=4, nodes_per_pod=16)
    else:
        shape = FabricShape(kind="clos2", nodes_per_switch=16)
    return build(shape, name="tree", num_nodes=num_hosts, ports_per_node=1, nic_bytes_per_second=RATE)


def case(name: str, fabric: Fabric, pairs: list[tuple[int, int]], num_bytes: float) -> Case:
    """All flows at once, by ECMP."""
    source, target = np.array(pairs, dtype=np.int32).T
    num = len(pairs)
    entropy = np.arange(num).astype(np.uint16)
    flows = Flows(source, target, np.full(num, num_bytes), np.zeros(num), entropy)
    return Case(name, fabric, flows, ecmp(Routes(fabric), flows))


def cases() -> list[Case]:
    """Incast, all-to-all, pairs."""
    small, large = tree(128), tree(256)
    everybody = [(a, b) for a in range(256) for b in range(256) if a != b]
    return [
        case("incast 100 to 1, 2 MB", small, [(host, 0) for host in range(1, 101)], 2e6),
        case("all-to-all of 256, 64 KiB", large, everybody, 65536),
        case("128 pairs, 20 MB", large, [(host, host + 128) for host in range(128)], 20e6),
    ]


def ours(what: Case, name: str | None, repeats: int) -> None:
    """One line."""
    settings = replace(
        SwitchSettings.simulator(RATE),
        pfc_xoff_bytes=HIGH * WIRE,
        pfc_xon_bytes=LOW * WIRE,
        buffer_bytes=64e6,
    )
    control: Control | None = CONTROLS[name] if name else None
    best, used = np.inf, np.inf
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        result = simulate_packets(what.fabric, what.flows, what.paths, control, settings)
        best, used = min(best, time.perf_counter() - start), min(used, time.process_time() - cpu)
    last = f"{np.nanmax(result.finish_seconds) * 1e3:.3f}"
    tell(what.name, name or "line rate", best, used, result.num_events, what.num_packet_hops, last)


def tell(
    what: str, who: str, wall: float, cpu: float, num_events: int | None, hops: float, last: str
) -> None:
    """One row of the table."""
    events = f"{num_events:>11,} {num_events / cpu / 1e6:>6.1f} M" if num_events else f"{'':>11} {'':>8}"
    print(f"{what:<26} {who:<16} {wall:>8.3f} {cpu:>8.3f} {events} {hops / cpu / 1e6:>6.1f} M {last:>9}")


def theirs(folder: Path, what: Case, repeats: int) -> None:
    """htsim on the incast."""
    num = len(what.flows)
    lines = [f"Nodes {what.fabric.num_ports}", f"Connections {num}"]
    ends = zip(what.flows.source, what.flows.target, strict=True)
    lines += [f"{a}->{b} id {flow + 1} start 0 size 2000000" for flow, (a, b) in enumerate(ends)]
    with tempfile.TemporaryDirectory() as scratch:
        matrix = Path(scratch) / "incast.cm"
        matrix.write_text("\n".join(lines) + "\n")
        for program in ("htsim_roce", "htsim_hpcc"):
            command = [
                str(folder.resolve() / program), "-tm", str(matrix), "-o", str(Path(scratch) / "log"),
                "-nodes", str(what.fabric.num_ports), "-mtu", str(WIRE),
                "-linkspeed", str(int(RATE * 8 / 1e6)),
                "-hop_latency", "1", "-strat", "ecmp_host", "-paths", "64", "-q", "100000",
                "-end", "1000000", "-pfc_thresholds", str(LOW), str(HIGH),
            ]  # fmt: skip
            one(program, command, Path(scratch), what, repeats)


def one(program: str, command: list[str], scratch: Path, what: Case, repeats: int) -> None:
    """Best of its runs, in a folder of their own: it leaves files where it runs."""
    best, used = np.inf, np.inf
    for _ in range(repeats):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=scratch).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, time.perf_counter() - start)
        used = min(used, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    finished = [float(seconds) for seconds in re.findall(r"finished at ([\d.]+)", out)]
    if len(finished) != len(what.flows):
        raise SystemExit(f"{program}: {len(finished)} of {len(what.flows)} flows finished")
    last = f"{max(finished) / 1e3:.3f}"
    tell(what.name, program, best, used, None, what.num_packet_hops, last)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--htsim", type=Path, help="folder with htsim_roce and htsim_hpcc")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    all_cases = cases()
    tiny = case("", tree(128), [(0, 1)], 1e4)
    start = time.perf_counter()
    simulate_packets(tiny.fabric, tiny.flows, tiny.paths, None, SwitchSettings.simulator(RATE))
    print(f"first call, compiling unless that is kept from before: {time.perf_counter() - start:.1f} s")
    names = f"{'events':>11} {'per s':>8} {'hops/s':>8} {'last ms':>9}"
    print(f"{'':<26} {'':<16} {'wall s':>8} {'core s':>8} {names}")
    incast = all_cases[0]
    for name in (None, "dcqcn", "dcqcn-tuned", "swift", "hpcc", "hybrid"):
        ours(incast, name, given.repeats)
    if given.htsim:
        theirs(given.htsim, incast, given.repeats)
    for what in all_cases[1:]:
        for name in (None, "dcqcn", "hpcc"):
            ours(what, name, max(1, given.repeats // 2))


if __name__ == "__main__":
    main()
