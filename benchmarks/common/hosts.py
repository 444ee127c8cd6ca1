"""Hosts on one machine: network namespaces on a bridge, joined by links of a given rate.

    with Hosts(2, rate="200mbit") as hosts:
        losses = hosts.run_ranks(train, 20, world=2)       what train(20) gives on each rank, in rank order
        hosts.set_rate("50mbit")                           live; None: unshaped
        hosts.set_link(1, up=False)                        pulls the cable of host 1
        hosts.drop(1, 0.05)                                5 % of what arrives at host 1 is lost; 0: none
        hosts.set_half_duplex(1, "20mbit")                 both ways of its link share the rate; None: no more
        hosts.lose(1)                                      all that runs in host 1 dies
        process = hosts.start(0, ["myriad", "train"])      any command, as `subprocess.Popen`

    python benchmarks/common/hosts.py --check --rate 200mbit      what a plain socket reaches, of the rate set

         host 0                        switch                        host 1
    ranks 0 .. k-1  eth0 ══════ port0 ═ bridge ═ port1 ══════ eth0  ranks k .. 2k-1
                    tbf ->      <- tbf           tbf ->      <- tbf

A link is shaped at both of its ends: what a host sends at its eth0, what it receives at the switch's port, so
that two senders share a receiver's link as they would at a real switch. With two hosts the first shaper
paces the traffic and the second has nothing to do.

Hosts, switch and cables are `myriad.faults.namespaces`; here are rates, and ranks. Needs root, and
ip and tc of iproute2.

A rank is a forked process on one core of its own (several share one when there are too few), in the
network, mount and hostname namespaces of its host.
"""

import argparse
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from host_ranks import Place, Ranks
from link_speed import send_and_count
from myriad.faults import namespaces
from myriad.faults.namespaces import Namespaces, run

__all__ = ["Hosts", "bits_per_second", "missing"]

_TOOLS = ("ip", "tc")
_BPF_RANDOM, _BPF_ALL = 0xFFFFF000 + 56, 0xFFFFFFFF
"""SKF_AD_OFF + SKF_AD_RANDOM (linux/filter.h); a verdict that picks the packet."""
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def missing() -> str | None:
    """Why hosts cannot be made here; ``None`` where they can."""
    return namespaces.why_unavailable(_TOOLS)


def bits_per_second(rate: str) -> float:
    """``200mbit`` is 2e8. Raises `ValueError` for what tc would not take."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate.lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"rate = {rate!r}: a number and bit, kbit, mbit or gbit, as in 200mbit")
    return float(found[1]) * _UNITS[found[2]]


def _shape(namespace: str, device: str, rate: str | None) -> None:
    """The queue holds 50 ms; the bucket one segment of 64 KiB as the kernel hands it down, with its
    headers (a smaller bucket has it cut in packets of 1,500 bytes: up to nine times the processor time and
    half the rate, measured), or 1 ms of fast links, whose timer would otherwise be late."""
    tc = ("tc", "-n", namespace, "qdisc")
    if rate is None:
        subprocess.run([*tc, "delete", "dev", device, "root"], capture_output=True)
        return
    burst = max(80_000, int(bits_per_second(rate) / 8 * 1e-3))
    run(*tc, "replace", "dev", device, "root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")


class Hosts(Namespaces):
    """``num_hosts`` namespaces on a bridge. Used as a context manager, by one thread."""

    TOOLS = _TOOLS

    def __init__(
        self, num_hosts: int, rate: str | None = None, *, cores: Sequence[int] | None = None
    ) -> None:
        """``rate`` of every link, both ways, as tc writes it; ``cores`` that ranks are pinned to in turn,
        by default all that this process may use."""
        super().__init__(num_hosts)
        if rate is not None:
            bits_per_second(rate)
        self.rate = rate
        self.cores = tuple(cores or sorted(os.sched_getaffinity(0)))
        self._ports = count(20_000)
        self._started: list[Ranks] = []

    def build(self) -> None:
        """And the rate."""
        super().build()
        self.set_rate(self.rate)

    def close(self) -> None:
        """Ends every process in the hosts and removes them; more than once does no harm."""
        for ranks in self._started:
            ranks.kill()
        super().close()

    def set_rate(self, rate: str | None, hosts: Sequence[int] | None = None) -> None:
        """Shapes the links of ``hosts`` (off: all) again, also while ranks run."""
        for host in range(self.num_hosts) if hosts is None else hosts:
            _shape(self.namespace(host), "eth0", rate)
            _shape(self.switch, self.port(host), rate)
        if hosts is None:
            self.rate = rate

    def drop(self, host: int, ratio: float) -> None:
        """Lose this share of the packets that arrive at a host, by chance. netem is not needed: a classifier
        of classic BPF compares the kernel's random number and sends what it picks to a device that is
        down."""
        name = self.namespace(host)
        subprocess.run(["tc", "-n", name, "qdisc", "delete", "dev", "eth0", "clsact"], capture_output=True)
        if not ratio:
            return
        subprocess.run(["ip", "-n", name, "link", "add", "nowhere", "type", "ifb"], capture_output=True)
        pick = f"4,32 0 0 {_BPF_RANDOM},53 1 0 {int(ratio * 2**32)},6 0 0 {_BPF_ALL},6 0 0 0"
        self._redirect(name, "ingress", pick, "nowhere")

    def set_half_duplex(self, host: int, rate: str | None) -> None:
        """Make both ways of a host's link share one rate, as a link does that came up half-duplex."""
        name = self.namespace(host)
        subprocess.run(["tc", "-n", name, "qdisc", "delete", "dev", "eth0", "clsact"], capture_output=True)
        if rate is None:
            return
        subprocess.run(["ip", "-n", name, "link", "add", "shared", "type", "ifb"], capture_output=True)
        run("ip", "-n", name, "link", "set", "shared", "up")
        _shape(name, "shared", rate)
        for way in ("ingress", "egress"):
            self._redirect(name, way, f"1,6 0 0 {_BPF_ALL}", "shared")

    @staticmethod
    def _redirect(name: str, way: str, bytecode: str, device: str) -> None:
        """Send the packets of eth0 that a classifier picks through another device."""
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "clsact"], capture_output=True)
        action = ("action", "mirred", "egress", "redirect", "dev", device)
        run("tc", "-n", name, "filter", "add", "dev", "eth0", way, "bpf", "bytecode", bytecode, *action)

    def start_ranks(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int | None = None,
        ranks_per_host: int = 1,
        first_host: int = 0,
    ) -> Ranks:
        """Starts ``function(*arguments)`` on each rank; ranks fill one host after the other, from
        ``first_host`` on.

        ``world`` off: every host full. Nothing is pickled on the way in: any function will do. The caller
        must not have run torch on several threads (a forked process cannot)."""
        num_hosts = self.num_hosts - first_host
        world = world or num_hosts * ranks_per_host
        if not 1 <= world <= num_hosts * ranks_per_host:
            allowed = f"1 to {num_hosts} hosts x {ranks_per_host} ranks"
            raise ValueError(f"world = {world}: {allowed}")
        port = next(self._ports)
        places = [self._place(rank, world, ranks_per_host, first_host, port) for rank in range(world)]
        self._started.append(Ranks(places, partial(function, *arguments)))
        return self._started[-1]

    def _place(self, rank: int, world: int, ranks_per_host: int, first_host: int, port: int) -> Place:
        node, local_rank = divmod(rank, ranks_per_host)
        host = first_host + node
        return Place(
            rank=rank,
            namespace=self.namespace(host),
            hostname=f"host{host}",
            core=self.cores[rank % len(self.cores)],
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(min(ranks_per_host, world - node * ranks_per_host)),
                "MASTER_ADDR": self.address(first_host),
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            },
        )

    def run_ranks(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int | None = None,
        ranks_per_host: int = 1,
        first_host: int = 0,
        timeout_seconds: float = 270.0,
    ) -> list[Any]:
        """What ``function(*arguments)`` gives on each rank. A failing rank's traceback becomes the error, and
        the others are ended."""
        ranks = self.start_ranks(
            function, *arguments, world=world, ranks_per_host=ranks_per_host, first_host=first_host
        )
        try:
            return ranks.results(timeout_seconds)
        finally:
            ranks.kill()
            self._started.remove(ranks)


def _check(rates: Sequence[str], seconds: float) -> None:
    print(f"{'rate':>10}{'one way':>16}{'both ways':>28}   payload, and of the rate")
    with Hosts(2) as hosts:
        for rate in rates:
            hosts.set_rate(None if rate == "unshaped" else rate)
            one = hosts.run_ranks(send_and_count, seconds, False)[1:]
            both = hosts.run_ranks(send_and_count, seconds, True)
            line = "".join(_reached(bits, rate) for bits in one + both)
            print(f"{rate:>10}  {line}", flush=True)


def _reached(bits: float, rate: str) -> str:
    share = "" if rate == "unshaped" else f"{bits / bits_per_second(rate):>6.1%}"
    return f"{bits / 1e6:>8.0f}{share}"


def main() -> None:
    """Checks what links really give."""
    parser = argparse.ArgumentParser(description="What two plain sockets reach over links of a given rate.")
    parser.add_argument("--check", action="store_true", help="measure (there is nothing else to do)")
    parser.add_argument("--rate", nargs="+", default=["unshaped", "1gbit", "400mbit", "200mbit", "50mbit"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of sending, each way")
    settings = parser.parse_args()
    _check(settings.rate, settings.seconds)


if __name__ == "__main__":
    main()
