"""Expert parallelism over shaped links: the all-to-all beside gloo's own; a step with and without overlap.

    python benchmarks/links/expert_exchange.py [--rates unshaped 1gbit 200mbit 50mbit] [--hosts 2 4] [--quick]
        [--parts exchange dispatch step] [--micro-batches 8]

Each rank is one thread in a host of its own (`hosts.py`), pinned to a core; for ``dispatch`` a host has two.

    exchange  rows to the ranks of their experts, as training sends them (`myriad.parallel.expert_exchange`),
              beside ``torch.distributed.all_to_all_single`` with the same sizes. uniform: equally many rows
              for each rank; skewed: rank 0 gets half of every rank's rows
    dispatch  tokens to their experts and the sums of the results back, without what the experts compute: a
              row for each expert, rank or node (``layout.expert_dispatch``), beside the same written with
              torch's operators and `all_to_all_single`. uniform: experts are drawn evenly; skewed: about half
              of all choices are experts of rank 0
    step      a training iteration of a mixture of experts on two hosts, of several micro-batches: each
              exchange is waited for; parts of a micro-batch take turns (``overlap.tensor``); or the forward
              of one is paired with the backward of another (``overlap.pairs``)
    PyTorch   the same step in plain PyTorch (`peers/expert_parallel.py`): its loss and gradient norm of the
              first two steps have to be Myriad's
    compute   the same step with every exchange of rows left out (results are wrong, shapes right)
    wire      bytes that one rank has to send in a step, at the nominal rate of the link
    messages  the exchanges of the step with pairs alone, in their order, two in flight: what the headers of
              packets and unequal loads of the two ranks add to the wire
    bound     the larger of compute and messages; of compute and wire

A figure is the quickest repeat, of the slower rank; the contenders take turns within each repeat.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from myriad.comm.config import CommConfig
from myriad.comm.grid import RankGrid
from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.experts import Experts
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.parallel.expert_exchange import ExpertPeers, start_rows
from myriad.parallel.tensor_parallel import make_boundary
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from expert_steps import Exchanged, exchange_alone, random_batch, recording, slowest_seconds, stays
from hosts import Hosts, bits_per_second
from peers.expert_parallel import ExpertParallel

CPU = torch.device("cpu")
STEPS_OF: dict[str, dict[str, object]] = {
    "compute": {"tensor": None},
    "off": {"tensor": None},
    "turns 2": {"tensor_chunks": 2, "tensor_message": 1},
    "turns 4": {"tensor_chunks": 4, "tensor_message": 1},
    "pairs": {"tensor": None, "pairs": True},
}
"""Keys of ``overlap`` of each contender of `step_seconds`."""
SEED, LEARNING_RATE = 1, 1e-3


def sizes_of(rank: int, ranks: int, rows: int, kind: str) -> list[int]:
    """Rows of one rank for each rank."""
    if kind == "uniform":
        return [rows // ranks] * ranks
    others = rows // 2 // (ranks - 1)
    return [rows - others * (ranks - 1), *[others] * (ranks - 1)]


def exchange_seconds(ranks: int, rows: int, hidden: int, repeats: int) -> dict[str, float]:
    """Return the seconds of each exchange, measured on one rank."""
    groups = open_world(Layout(dp=ranks, ep=ranks), CPU)
    peers = ExpertPeers.of(groups, Recorder(), CPU)
    found: dict[str, float] = {}
    x = torch.randn(rows, hidden)
    for kind in ("uniform", "skewed"):
        leaving = sizes_of(peers.rank, ranks, rows, kind)
        arriving = [sizes_of(rank, ranks, rows, kind)[peers.rank] for rank in range(ranks)]
        out = torch.empty(sum(arriving), hidden)

        def ours(leaving: Sequence[int] = leaving, arriving: Sequence[int] = arriving) -> object:
            with torch.no_grad():
                return start_rows(x, peers, leaving, arriving, None).wait()

        def theirs(
            out: torch.Tensor = out, sizes: tuple[list[int], list[int]] = (arriving, leaving)
        ) -> object:
            return dist.all_to_all_single(out, x, *sizes, group=peers.group)

        contenders: dict[str, Callable[[], object]] = {f"{kind} myriad": ours, f"{kind} gloo": theirs}
        for _ in range(repeats + 1):
            for name, contender in contenders.items():
                seconds = slowest_seconds(contender)
                found[name] = min(found.get(name, seconds), seconds)
    dist.barrier()
    close_world()
    return found


@dataclass(frozen=True)
class Dispatched:
    """What every contender of a dispatch sends."""

    tokens: int
    model: ModelConfig

    def logits(self, rank: int, ranks: int, kind: str) -> torch.Tensor:
        """Products of the router for the tokens of a rank."""
        assert self.model.experts is not None
        generator = torch.Generator().manual_seed(rank)
        found = torch.randn(1, self.tokens, self.model.experts, generator=generator)
        if kind == "skewed":
            found[..., : self.model.experts // ranks] += 0.75
        return found


@torch.no_grad()
def dispatch_plainly(experts: Experts, x: torch.Tensor, logits: torch.Tensor, peers: ExpertPeers) -> None:
    """Send a row for each expert, and sum what comes back, as it is written with torch alone."""
    gates, chosen = experts.router.choose(logits)
    wanted = chosen.flatten()
    order = wanted.argsort()
    rows = x[0].index_select(0, order // chosen.shape[1])
    counts = torch.bincount(wanted, minlength=experts.num_experts)
    found = torch.empty_like(counts)
    dist.all_to_all_single(found, counts, group=peers.group)
    leaving, arriving = (one.view(peers.size, -1).sum(1).tolist() for one in (counts, found))
    arrived = rows.new_empty(sum(arriving), rows.shape[1])
    dist.all_to_all_single(arrived, rows, arriving, leaving, group=peers.group)
    numbers = torch.arange(len(counts) // peers.size).repeat(peers.size).repeat_interleave(found)
    by_expert = numbers.argsort()
    results = torch.empty_like(arrived).index_copy_(0, by_expert, arrived.index_select(0, by_expert))
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, results, leaving, arriving, group=peers.group)
    of_tokens = torch.empty_like(back).index_copy_(0, order, back).view(*chosen.shape, -1)
    (of_tokens * gates[..., None]).sum(1)


def dispatch_seconds(work: Dispatched, ranks_per_host: int, repeats: int) -> dict[str, float]:
    """Return the seconds of each way to the experts and back, measured on one rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    world = open_world(Layout(dp=ranks, ep=ranks), CPU)
    rank, comm = world.grid.rank, CommConfig(node_size=ranks_per_host)
    found, contenders = dict[str, float](), dict[str, Callable[[torch.Tensor, torch.Tensor], object]]()
    for mode in ("expert", "rank", "node"):
        grid = RankGrid(Layout(dp=ranks, ep=ranks, expert_dispatch=mode), rank)
        groups = Groups(grid, CPU, comm=comm)
        boundary = make_boundary(groups, OverlapConfig(), Recorder(), "auto", CPU)
        experts = Experts(work.model, boundary)
        for number in experts.experts:
            experts.experts[number] = nn.Identity()
        contenders[mode] = experts
    peers = ExpertPeers.of(world, Recorder(), CPU)
    contenders["torch"] = lambda x, logits: dispatch_plainly(experts, x, logits, peers)
    x = torch.randn(1, work.tokens, work.model.hidden)
    for kind in ("uniform", "skewed"):
        logits = work.logits(rank, ranks, kind)
        for _ in range(repeats + 1):
            for name, contender in contenders.items():
                dist.barrier()
                start = time.perf_counter()
                with torch.no_grad():
                    contender(x, logits)
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                key = f"{kind} {name}"
                found[key] = min(found.get(key, 1e9), float(seconds))
    dist.barrier()
    close_world()
    return found


@dataclass(frozen=True)
class Work:
    """What every contender of a step computes."""

    model: ModelConfig
    sequences: int
    """Sequences of a micro-batch."""
    micro_batches: int

    def batch(self, rank: int, micro_batches: int) -> Batch:
        """So many micro-batches of a rank."""
        model = self.model
        return random_batch(self.sequences * micro_batches, model.sequence, model.vocabulary, rank)

    def wire_seconds(self, rate: str) -> float:
        """Seconds to send what a rank sends to one other in a step, if experts are equally loaded."""
        if rate == "unshaped":
            return 0.0
        model = self.model
        tokens = self.sequences * model.sequence * model.experts_per_token
        values = 4 * model.layers * self.micro_batches * tokens / 2 * model.hidden
        return 8 * 4 * values / bits_per_second(rate)


def compare_steps(engine: Engine, plain: ExpertParallel, batch: Batch, targets: int) -> None:
    """Raise an error unless both have the same losses and gradient norms in two steps, from equal initial
    values."""
    for _ in range(2):
        own = engine.train_step(lambda: batch, LEARNING_RATE, targets)
        loss, norm = plain.train_step(batch.inputs, batch.targets)
        for one, other, limit in ((own.loss, loss, 1e-5), (own.grad_norm, norm, 1e-4)):
            assert abs(one - other) < limit * abs(one), f"PyTorch has {other:.7f} instead of {one:.7f}"


def step_seconds(work: Work, repeats: int) -> dict[str, float]:
    """Return the seconds of a step of each contender, measured on one rank."""
    groups = open_world(Layout(dp=2, ep=2, micro_batch=work.sequences), CPU)
    batch, engines, found = work.batch(groups.grid.rank, work.micro_batches), {}, dict[str, float]()
    for name, keys in STEPS_OF.items():
        engine = engines[name] = Engine(
            GPT(work.model, SEED),
            groups,
            [range(work.model.layers + 2)],
            work.batch(0, 1),
            work.micro_batches,
            OptimizerConfig(learning_rate=LEARNING_RATE),
            seed=SEED,
            dtype=torch.float32,
            device=CPU,
            recorder=Recorder(),
            overlap=OverlapConfig.model_validate(keys),
        )
        layers = [layer for stage in engine.model.stages.values() for layer in stage.layers.values()]
        for layer in layers if name == "compute" else ():
            for experts in (one for one in layer.modules() if isinstance(one, Experts)):
                experts.boundary.start_exchange = stays  # type: ignore[method-assign]
    targets, exchanges = 2 * work.micro_batches * work.sequences * work.model.sequence, list[Exchanged]()
    with recording(exchanges):
        engines["pairs"].train_step(lambda: batch, LEARNING_RATE, targets)
    plain = ExpertParallel(work.model, SEED, work.sequences)
    compare_steps(engines["off"], plain, batch, targets)
    contenders: dict[str, Callable[[], object]] = {
        name: partial(engine.train_step, lambda: batch, LEARNING_RATE, targets)
        for name, engine in engines.items()
    }
    contenders["PyTorch"] = partial(plain.train_step, batch.inputs, batch.targets)
    contenders["messages"] = partial(exchange_alone, exchanges)
    for _ in range(repeats + 1):
        for name, contender in contenders.items():
            seconds = slowest_seconds(contender)
            found[name] = min(found.get(name, seconds), seconds)
    dist.barrier()
    for engine in engines.values():
        engine.close()
    close_world()
    return found


def print_exchanges(rates: Sequence[str], hosts: Sequence[int], rows: int, hidden: int, repeats: int) -> None:
    """Time the exchanges, and print the table."""
    print(f"exchange of {rows} rows of {hidden} values\n")
    print("| hosts | link | sizes | Myriad, ms | gloo, ms | gloo / Myriad |")
    print("|---|---|---|---|---|---|")
    for number in hosts:
        for rate in rates:
            with Hosts(number, None if rate == "unshaped" else rate) as made:
                ranks = made.run_ranks(exchange_seconds, number, rows, hidden, repeats, timeout_seconds=600)
            for kind in ("uniform", "skewed"):
                own, other = (1e3 * ranks[0][f"{kind} {name}"] for name in ("myriad", "gloo"))
                line = f"| {number} | {rate} | {kind} | {own:.1f} | {other:.1f} | {other / own:.2f} |"
                print(line, flush=True)


def print_dispatches(rates: Sequence[str], hosts: Sequence[int], work: Dispatched, repeats: int) -> None:
    """Time the ways to the experts and back, and print the table."""
    model = work.model
    choice = f"{model.experts_per_token} of {model.experts} experts"
    print(f"\ndispatch and return of {work.tokens} tokens a rank, {model.hidden} values, {choice}\n")
    print("| hosts x ranks | link | experts | torch, ms | expert | rank | node | torch / node |")
    print("|---|---|---|---|---|---|---|---|")
    for number in hosts:
        each = 2 if number == 2 else 1
        for rate in rates:
            with Hosts(number, None if rate == "unshaped" else rate) as made:
                found = made.run_ranks(
                    dispatch_seconds,
                    work,
                    each,
                    repeats,
                    world=number * each,
                    ranks_per_host=each,
                    timeout_seconds=900,
                )[0]
            for kind in ("uniform", "skewed"):
                times = [1e3 * found[f"{kind} {name}"] for name in ("torch", "expert", "rank", "node")]
                cells = " | ".join(f"{one:.0f}" for one in times)
                print(
                    f"| {number} x {each} | {rate} | {kind} | {cells} | {times[0] / times[3]:.2f} |",
                    flush=True,
                )


def print_steps(rates: Sequence[str], work: Work, repeats: int) -> None:
    """Time the steps, and print the table."""
    model = work.model
    shape = f"{model.layers} layers of {model.hidden}, {model.experts} experts"
    tokens = f"{work.micro_batches} micro-batches of {work.sequences} x {model.sequence} tokens"
    print(f"\nstep of {tokens} a rank, {shape}, two hosts\n")
    print(
        "| link | compute, s | wire, s | messages, s | each waited for, s | turns 2, s | turns 4, s "
        "| pairs, s | PyTorch, s | off / turns | off / pairs | PyTorch / off | PyTorch / pairs "
        "| bound / pairs | with wire |"
    )
    print("|---" * 15 + "|")
    for rate in rates:
        with Hosts(2, None if rate == "unshaped" else rate) as made:
            found = made.run_ranks(step_seconds, work, repeats, timeout_seconds=900)[0]
        wire, turns = work.wire_seconds(rate), min(found["turns 2"], found["turns 4"])
        off, pairs, plain = found["off"], found["pairs"], found["PyTorch"]
        bound, with_wire = (max(found["compute"], one) / pairs for one in (found["messages"], wire))
        own = [found[name] for name in ("messages", "off", "turns 2", "turns 4", "pairs")]
        cells = " | ".join(f"{one:.3f}" for one in (found["compute"], wire, *own, plain))
        ratios = (off / turns, off / pairs, plain / off, plain / pairs)
        gains = " | ".join(f"{one:.2f} x" for one in ratios)
        print(f"| {rate} | {cells} | {gains} | {bound:.0%} | {with_wire:.0%} |", flush=True)


def main() -> None:
    """Measure the exchanges and the steps, and print a table of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["unshaped", "1gbit", "200mbit", "50mbit"])
    parts = ("exchange", "dispatch", "step")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    figures = (("rows", 4096), ("hidden", 256), ("repeats", 4), ("micro-batches", 8))
    for name, default in figures:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="two rates, two hosts, two repeats")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.hosts, options.repeats = ["1gbit", "200mbit"], [2], 2
    if "exchange" in options.parts:
        print_exchanges(options.rates, options.hosts, options.rows, options.hidden, options.repeats)
    if "dispatch" in options.parts:
        model = ModelConfig(hidden=options.hidden, experts=64, experts_per_token=8, expert_hidden=8)
        print_dispatches(options.rates, options.hosts, Dispatched(options.rows // 2, model), options.repeats)
    if "step" not in options.parts:
        return
    model = ModelConfig(
        layers=4,
        hidden=options.hidden,
        heads=4,
        sequence=256,
        vocabulary=1024,
        experts=8,
        expert_hidden=2 * options.hidden,
    )
    print_steps(options.rates, Work(model, 4, options.micro_batches), options.repeats)


if __name__ == "__main__":
    main()
