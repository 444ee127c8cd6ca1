"""How long ranks take to find each other: Myriad beside torch, and the store alone with up to 12,288 ranks.

    python benchmarks/links/startup.py [--quick] [--json]

(a) Real: forked ranks make the world and the dp, pp and tp groups of a cube and use each once; Myriad's way,
    and `init_process_group` with `init_device_mesh`, in turn, medians of three. "store only" is what any
    start has: reach the store, write one key, read one.
(b) Simulated: connections that send exactly what a start sends (8-way tensor, 8-way pipeline, the rest data
    parallelism), against Myriad's store, torch's TCPStore with libuv and without, and Redis, all on this
    machine; and what the full mesh of torch's gloo asks of Myriad's and torch's.

The growth exponent is the slope of log time over log ranks: 1 is linear. Redis is left out where there is no
redis-server. See `startup_ranks` for why loopback addresses are given names.
"""

import argparse
import json
import math
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import startup_clients
import startup_ranks
from startup_wire import OwnStore, Redis, TcpStore, Wire

REAL = (8, 16, 32, 64, 128)
SIMULATED = (256, 1024, 2048, 4096, 12288)
WITHOUT_LIBUV = (256, 512, 1024, 2048)
"""Without libuv the server looks at every connection for every message."""
MESH = (64, 128, 256, 512)
AIMS = {2048: 5.0, 12288: 30.0}
AIM_RATIO, AIM_RANKS = 5.0, 64


def exponent(rows: Sequence[dict[str, float]]) -> float:
    """Slope of log seconds over log ranks."""
    ranks, seconds = ([math.log(row[key]) for row in rows] for key in ("ranks", "seconds"))
    return statistics.linear_regression(ranks, seconds).slope


def real(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of processes and side."""
    print(f"real processes (median of {rounds}): seconds from the start of all ranks to the last that has")
    titles = f"{'the world':>10}{'all groups':>12}{'used them':>11}{'CPU, sum':>10}"
    print(f"{'ranks':>7} {'':12}{titles}  against torch")
    rows = []
    for world in sizes:
        found = startup_ranks.measure(world, rounds)
        for side, start in found.items():
            ratio = found["torch"].used_seconds / start.used_seconds
            rows.append({"ranks": world, "side": side, "ratio": ratio} | asdict(start))
            times = f"{start.world_seconds:10.3f}{start.groups_seconds:12.3f}{start.used_seconds:11.3f}"
            shown = f"  {ratio:.1f} x" if side == "myriad" else ""
            print(f"{world:7} {side:12}{times}{start.cpu_seconds:10.2f}{shown}", flush=True)
    return rows


def bound(rows: Sequence[dict[str, Any]], world: int) -> None:
    """Whether the aim is met, and what part of a start has nothing to do with the way of starting."""
    torch, mine, least = (row for row in rows if row["ranks"] == world)
    print(f"aim: {AIM_RATIO:g} x quicker than torch at {AIM_RANKS} ranks; at {world}: {mine['ratio']:.1f} x")
    most = torch["used_seconds"] / least["used_seconds"]
    print(f"bound: only to reach the store takes {least['used_seconds']:.3f} s: {most:.1f} x is the most")
    for side, row in (("torch", torch), ("Myriad", mine)):
        more, cpu = (row[key] - least[key] for key in ("used_seconds", "cpu_seconds"))
        own = [each for each in rows if each["side"] == row["side"]]
        growth = exponent([{"ranks": each["ranks"], "seconds": each["cpu_seconds"]} for each in own])
        print(f"past that {side} takes {more:.3f} s, {cpu:.2f} CPU seconds, growing as n^{growth:.2f}")


def simulated(wire: Wire, way: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of ranks."""
    title = wire.name + (", full mesh" if way == "mesh" else "")
    rows: list[dict[str, Any]] = []
    for world in sizes:
        found = [startup_clients.measure(wire, world, way) for _ in range(3 if world <= 1024 else 1)]
        row = sorted(found, key=lambda each: each["seconds"])[len(found) // 2]
        rows.append({"store": wire.name, "way": way} | row)
        aim = f"  aim {AIMS[world]:g} s" if way == "myriad" and world in AIMS else ""
        counts = f"{row['messages_per_rank']:12.1f}{row['replies_per_rank']:14.1f}"
        print(f"{world:7} {title:24}{row['seconds']:10.2f}{counts}{aim}", flush=True)
    if len(rows) > 1:
        print(f"{'':7} {title:24}growth exponent {exponent(rows):.2f}", flush=True)
    return rows


def store_alone(*, quick: bool) -> list[dict[str, Any]]:
    """All stores."""
    most = startup_clients.most_ranks()
    sizes = [world for world in SIMULATED[: 2 if quick else None] if world <= most]
    if len(sizes) < len(SIMULATED) and not quick:
        print(f"no more than {most} connections here (open files, ports): larger sizes are left out")
    print("\nsimulated ranks: seconds from the start of all to the end of the last; messages, replies of one")
    print(f"{'ranks':>7} {'store':24}{'seconds':>10}{'messages':>12}{'replies':>14}")
    rows = simulated(OwnStore(), "myriad", sizes)
    rows += simulated(TcpStore(libuv=True), "myriad", sizes)
    rows += simulated(TcpStore(libuv=False), "myriad", WITHOUT_LIBUV[: 2 if quick else None])
    if shutil.which("redis-server"):
        rows += simulated(Redis(), "myriad", sizes)
    else:
        print("Redis is left out: no redis-server here")
    for wire in (OwnStore(), TcpStore(libuv=True)):
        rows += simulated(wire, "mesh", MESH[: 2 if quick else None])
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, once: half a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    settings = parser.parse_args()
    named = startup_ranks.with_names()
    names = (
        "loopback addresses have names" if named else "loopback addresses have no names: look-ups are in it"
    )
    print(f"{len(os.sched_getaffinity(0))} cores, {names}\n")
    rows = real(REAL[:2] if settings.quick else REAL, 1 if settings.quick else 3)
    bound(rows, REAL[1] if settings.quick else AIM_RANKS)
    alone = store_alone(quick=settings.quick)
    if settings.json:
        print(json.dumps({"real": rows, "simulated": alone, "names": named}))


if __name__ == "__main__":
    main()
