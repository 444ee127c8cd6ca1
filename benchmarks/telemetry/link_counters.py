"""What it costs to look at a node's links each 10 ms, and what heartbeats weigh that report them.

    python benchmarks/telemetry/link_counters.py [--seconds 20] [--links eth0 lo]

a row       the counters alone, row after row without any wait sampler     the process that a node agent
starts (`myriad.telemetry.links.link_sampler`), on cores that are idle,
            and beside a process on every core that computes all the time, as ranks do
plain       the same rows by a loop in Python: sleep, netlink; a row each 10 ms
wait        only to wait: a sleep (a timer that is programmed) and the kernel's timer wheel (SO_RCVTIMEO)
heartbeat   bytes of a beat of a node with eight ranks and eight NICs, as it was and with traffic; of what the
            node is made of, sent when it changes

Shares are of one core: processor time by time.
"""

import argparse
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

from myriad.supervise.messages import Beat
from myriad.supervise.observations import GpuFacts, LinkStatus, LinkTraffic, NicFacts, NodeFacts, RankStatus
from myriad.telemetry.links.link_ring import LinkRing
from myriad.telemetry.links.link_sampler import sample
from myriad.telemetry.links.netlink import Kernel
from myriad.wire.frame_codes import MESSAGE_CODE_BYTES
from myriad.wire.framing import HEADER_BYTES
from myriad.wire.message_codec import write_message

EVERY = 0.01
FIRST_ROWS = 200
"""After which the machine code is there and caches are warm."""


def sampler(links: list[str], seconds: float) -> tuple[float, float]:
    """Microseconds of processor time of a row; milliseconds between two."""
    ring = LinkRing(links, seconds=2 * seconds + 10)
    words = [sys.executable, "-m", "myriad.telemetry.links.link_sampler", str(ring.descriptor), "-1", "0"]
    words += [str(os.getpid()), *links]
    process = subprocess.Popen(words, pass_fds=[ring.descriptor])
    try:
        while ring.num_written < FIRST_ROWS:
            time.sleep(0.05)
        rows, cpu, began = ring.num_written, thread_seconds(process.pid), time.perf_counter()
        time.sleep(seconds)
        rows, cpu = ring.num_written - rows, thread_seconds(process.pid) - cpu
        return cpu / rows * 1e6, (time.perf_counter() - began) / rows * 1e3
    finally:
        process.kill()
        process.wait()


def row_alone(links: list[str]) -> float:
    """Microseconds of a row's counters, with warm caches: the best of a few times 400 rows."""
    best = float("inf")
    for _ in range(10):
        ring = LinkRing(links, seconds=1e-3, every_seconds=1e-6)
        sample(ring.descriptor, -1, 0, links, rows=450)
        best = min(best, ring.cpu_seconds / 400 * 1e6)
    return best


def thread_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, by the scheduler's clock."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total * 1e-9


def plain(links: list[str], seconds: float) -> tuple[float, float]:
    """A loop in Python in this process."""
    kernel, count, began, cpu = Kernel(), 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        list(kernel.ask(links))
        count += 1
        time.sleep(max(0.0, began + count * EVERY - time.perf_counter()))
    return (time.process_time() - cpu) / count * 1e6, (time.perf_counter() - began) / count * 1e3


def wait(seconds: float, *, by_timer: bool) -> tuple[float, float]:
    """Nothing but the waiting."""
    idle, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 8000))
    idle_number, count, began, cpu = idle.fileno(), 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        count += 1
        if by_timer:
            time.sleep(EVERY)
        else:
            with suppress(BlockingIOError):
                os.read(idle_number, 1)
    found = (time.process_time() - cpu) / count * 1e6, (time.perf_counter() - began) / count * 1e3
    other.close()
    return found


def frame_bytes(message: object) -> int:
    """Return the size of a message on the wire."""
    return HEADER_BYTES + len(write_message(message)) + MESSAGE_CODE_BYTES


def beats() -> dict[str, int]:
    """Bytes on the wire."""
    ranks = [
        RankStatus(
            k, 20_000 + k, "R", "step", "reduce", 1234, 987_654, 987_653, 0.01234567, 7.1234567, 5.1234567
        )
        for k in range(8)
    ]
    links = [LinkStatus(f"mlx5_{k}:1", True, 1, 0) for k in range(8)]
    one = LinkTraffic(
        "mlx5_0:1", 1, 7.123, 12_345_678_901, 12_345_678_901, 41_234_567_890, 41_234_567_890, 1234, 3.21,
        5_345_678_901, 5_345_678_901, 41_234_567_890, 41_234_567_890, 0.01, 0, 0,
    )  # fmt: skip
    traffic = tuple(replace(one, name=link.name) for link in links)
    before = Beat(7, 3, 29500, tuple(ranks), tuple(links), (), 1_795_476_472.316698)
    gpus = tuple(
        GpuFacts("NVIDIA H100 80GB HBM3", f"165232301{k:04}", f"0000:{k:02x}:00.0") for k in range(8)
    )
    nics = tuple(NicFacts(f"mlx5_{k}", "a088:c203:0045:1c2e", "MT4129", "28.39.1002", 5e10) for k in range(8))
    versions = {"kernel": "5.15.0-101-generic", "nvidia": "550.54.15", "mlx5_core": "24.01-0.3.3"}
    facts = NodeFacts(7, "gpu-17", "10.0.0.17", "job-7-x2vkq", "Xeon 8480 x 112", 2**41, gpus, nics, versions)
    beat = replace(before, traffic=traffic)
    return {
        "beat without traffic": frame_bytes(before),
        "beat": frame_bytes(beat),
        "what the node is, when it changes": frame_bytes(facts),
    }


def main() -> None:
    """Measure each way of reading and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--links", nargs="+", default=[name for _, name in socket.if_nameindex() if name != "lo"][:1]
    )
    given = parser.parse_args()
    print(f"links: {', '.join(given.links)}; {os.cpu_count()} cores")
    print(f"{'':34}{'us a row':>10}{'ms apart':>10}{'of a core':>11}")
    alone = row_alone(given.links)
    print(f"{'a row, without waiting':34}{alone:10.1f}{'':10}{alone / EVERY * 1e-6:11.3%} at 10 ms")
    for busy in (False, True):
        spinning = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
        ]
        if not busy:
            for one in spinning:
                one.send_signal(signal.SIGSTOP)
        where = "cores compute" if busy else "idle cores"
        try:
            for name, found in (
                ("sampler", sampler(given.links, given.seconds)),
                ("plain loop in Python", plain(given.links, given.seconds)),
                ("wait: sleep", wait(given.seconds / 4, by_timer=True)),
                ("wait: timer wheel", wait(given.seconds / 4, by_timer=False)),
            ):
                micro, apart = found
                print(f"{name + ', ' + where:34}{micro:10.1f}{apart:10.2f}{micro / apart / 1e3:11.3%}")
        finally:
            for one in spinning:
                one.kill()
                one.wait()
    for name, count in beats().items():
        print(f"{name:34}{count:10,} bytes")


if __name__ == "__main__":
    main()
