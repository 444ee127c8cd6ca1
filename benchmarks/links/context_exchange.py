"""Attention of a sequence that hosts share, over shaped links: ring and heads beside other ways.

    python benchmarks/links/context_exchange.py [--rates unshaped 1gbit 200mbit 50mbit] [--hosts 2 4]
        [--sequences 8192 16384] [--quick]

Each rank is one thread in a host of its own (`hosts.py`), pinned to a core. A figure is forward and backward
of one layer's causal attention, without its projections, in float32: the quickest repeat, of the slower rank.

    ring      keys and values travel around a ring (`layout.cp`)
    heads     positions are exchanged for heads (`layout.ulysses` = the hosts)
    gather    the plain way: every rank gathers all keys and values, attends with a mask of positions, and
              scatters the sums of their gradients; positions as in the ring
    torch     ``torch.distributed.tensor.experimental.context_parallel``, where it runs
    compute   the ring with nothing sent (results are wrong, shapes right)
    wire      seconds in which the fuller direction of a rank's link carries the ring's bytes at its rate
    bound     the larger of the two
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.kernels.attention_choice import Scores
from myriad.kernels.ring_plan import halves_sent
from myriad.model.context_share import attend_in_context
from myriad.parallel.context_exchange import ContextGroup
from myriad.telemetry.spans import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """The attention of one layer."""

    sequence: int
    heads: int = 8
    kv_heads: int = 2
    width: int = 32

    def wire_seconds(self, rate: str, hosts: int) -> float:
        """Seconds for what a rank of a ring sends in forward and backward."""
        if rate == "unshaped":
            return 0.0
        half = 4 * self.sequence // hosts * self.kv_heads * self.width
        most = max(2 * keys + sums for keys, sums in halves_sent(self.sequence, None, hosts))
        return 8 * half * most / bits_per_second(rate)


class _Nothing:
    """A ring in which nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start_shift(self, leaving: torch.Tensor, arriving: torch.Tensor, step: int) -> "_Kept":
        return _Kept(arriving.zero_())

    def start_exchange(
        self, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
    ) -> "_Kept":
        return _Kept(torch.empty(0))

    def block(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


class _Kept:
    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def wait(self) -> torch.Tensor:
        return self._x


class _Alone:
    """The peers of a rank that sends nothing."""

    def __init__(self, peers: ContextGroup) -> None:
        self.ring, self.ulysses, self.column = _Nothing(peers.ring.rank, peers.ring.size), 1, 0
        self.num_ranks = peers.num_ranks


def measure(hosts: int, work: Work, repeats: int) -> dict[str, float]:
    """Return the seconds of each contender, measured on one rank."""
    groups = open_world(Layout(cp=hosts), CPU)
    ring = ContextGroup(groups, Recorder(), CPU)
    by_heads = open_rows(hosts)
    contenders: dict[str, Callable[[], Any]] = {
        "ring": lambda: in_context(ring, work),
        "heads": lambda: in_context(by_heads, work),
        "gather": lambda: gathered(ring, work),
        "compute": lambda: in_context(ring, work, _Alone(ring)),
    }
    if torch_runs(work):
        contenders["torch"] = lambda: by_torch(work)
    found: dict[str, float] = {}
    for _ in range(repeats + 1):
        for name, contender in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            contender()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[name] = min(found.get(name, 1e9), float(seconds))
    dist.barrier()
    close_world()
    return found


def open_rows(hosts: int) -> ContextGroup:
    """Return the peers that exchange heads, in the same world."""
    from myriad.comm.grid import RankGrid
    from myriad.comm.groups import Groups

    grid = RankGrid(Layout(cp=hosts, ulysses=hosts), dist.get_rank())
    return ContextGroup(Groups(grid, CPU), Recorder(), CPU)


def leaves(work: Work, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of so many positions."""
    q, k, v = (
        torch.randn(1, positions, heads, work.width).requires_grad_()
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    )
    return q, k, v


def in_context(group: ContextGroup, work: Work, peers: Any = None) -> None:
    """Attend as training does, forward and backward."""
    share = group.share(work.sequence)
    out = attend_in_context(leaves(work, share.length), peers or group, share, None, Scores())
    out.backward(torch.ones_like(out))


def gathered(group: ContextGroup, work: Work) -> None:
    """Gather all keys and values, and attend with a mask."""
    share = group.share(work.sequence)
    q, k, v = leaves(work, share.length)
    own, repeats = share.positions(CPU), work.heads // work.kv_heads
    keys, values = (all_gather_tensor_autograd(one, 1, dist.group.WORLD) for one in (k, v))
    every: list[torch.Tensor] = [torch.empty_like(own) for _ in range(group.num_ranks)]
    dist.all_gather(every, own)
    mask = torch.cat(every) <= own[:, None]
    q, keys, values = (one.transpose(1, 2) for one in (q, keys, values))
    keys, values = (one.repeat_interleave(repeats, 1) for one in (keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    out.backward(torch.ones_like(out))


def by_torch(work: Work) -> None:
    """Attend by torch's own context parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (one.transpose(1, 2).detach() for one in leaves(work, work.sequence))
    k, v = (one.repeat_interleave(work.heads // work.kv_heads, 1) for one in (k, v))
    buffers = [q, k, v]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers={*buffers}):
        own = [one.requires_grad_() for one in (q, k, v)]
        out = F.scaled_dot_product_attention(*own, is_causal=True)
        out.backward(torch.ones_like(out))


def torch_runs(work: Work) -> bool:
    """Return whether torch's context parallelism runs here."""
    try:
        by_torch(work)
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"torch's context_parallel fails: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["unshaped", "1gbit", "200mbit", "50mbit"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sequences", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rates, two hosts, one sequence, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.hosts = ["1gbit", "200mbit"], [2]
        options.sequences, options.repeats = [8192], 1
    names = ("compute", "wire", "ring", "heads", "gather", "torch")
    heads = (
        "hosts",
        "positions",
        "link",
        *(f"{name}, s" for name in names),
        "ring / bound",
        "best peer / best",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for hosts in options.hosts:
        for sequence in options.sequences:
            for rate in options.rates:
                work = Work(sequence)
                with Hosts(hosts, None if rate == "unshaped" else rate) as made:
                    found = made.run_ranks(measure, hosts, work, options.repeats, timeout_seconds=900)[0]
                found["wire"] = work.wire_seconds(rate, hosts)
                cells = [f"{found[name]:.3f}" if name in found else "" for name in names]
                bound, best = max(found["compute"], found["wire"]), min(found["ring"], found["heads"])
                peer = min(found[name] for name in ("gather", "torch") if name in found)
                cells += [f"{found['ring'] / bound:.2f} x", f"{peer / best:.2f} x"]
                print(f"| {hosts} | {sequence} | {rate} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
