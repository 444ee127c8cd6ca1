"""Tensor parallelism of two ranks over a shaped link, with and without `overlap.tensor`.

    python benchmarks/links/tensor_overlap.py [--rates unshaped 1gbit 400mbit] [--settings turns:2 slices:4]

Each rank is one thread pinned to a core of its own, in a host of its own (`hosts.py`). A step is a whole
training iteration of one micro-batch: forward, backward, optimizer. Settings take turns within each repeat; a
figure is the quickest repeat, of the slower rank.

    compute   the same step with every tensor-parallel transfer left out (results are wrong, shapes right)
    wire      bytes that one rank has to send in a step, at the nominal rate of the link
    bound     the larger of the two: nothing that sends so many bytes and computes so much can be quicker
    phases    the same for forward and backward apart: with one micro-batch in a step, the forward's half of
              the bytes has only the forward's third of the compute to hide behind

In the serial block each layer sends eight times in forward and backward, in the parallel block four. Sending
and receiving cost processor time too, which no bound counts: about 1 ns a byte each way here.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.layout import Layout
from myriad.model.boundary import Arrived, Arriving, Boundary
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.model.interleave import SteppedLayer
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.program.config import OverlapConfig
from myriad.telemetry.spans import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second

RANKS = 2
COMPUTE, OFF = "compute", "off"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """What every setting computes."""

    model: ModelConfig
    sequences: int

    def bytes_sent(self) -> int:
        """By one rank in one step, but for a few bytes for each token in the loss."""
        passes = (8 if self.model.block == "serial" else 4) * self.model.layers + 4  # embedding 2, head 2
        tensor = 4 * self.sequences * self.model.sequence * self.model.hidden
        return passes * tensor * (RANKS - 1) // RANKS

    def batch(self) -> Batch:
        generator = torch.Generator().manual_seed(1)
        shape = (self.sequences, self.model.sequence + 1)
        tokens = torch.randint(self.model.vocabulary, shape, generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Batch(inputs, targets, torch.arange(self.sequences))


class Silent(Boundary):
    """Computes as one of several ranks does, and sends nothing."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, RANKS

    def start_all_gather(self, x: torch.Tensor) -> Arriving:
        return Arrived(torch.cat([x] * self.size, 1))

    def start_reduce_scatter(self, x: torch.Tensor) -> Arriving:
        return Arrived(x.chunk(self.size, 1)[self.rank])

    def start_stack(self, x: torch.Tensor) -> Arriving:
        return Arrived(torch.stack([x] * self.size))


@dataclass
class Measured:
    """One setting on one rank."""

    seconds: list[float] = field(default_factory=list)
    spans: list[dict[str, float]] = field(default_factory=list)
    """Seconds by name of span, of each step."""
    loss: float = 0.0

    def least(self, name: str) -> float:
        """Seconds in such spans, in the step that had fewest."""
        return min(spans.get(name, 0.0) for spans in self.spans)


class Contender:
    """One setting, ready to take steps."""

    def __init__(self, work: Work, setting: str, groups: Groups) -> None:
        self.work, self.batch, self.recorder = work, work.batch(), Recorder()
        kind, _, chunks = setting.partition(":")
        hides = setting not in (COMPUTE, OFF)
        keys = {"tensor_chunks": int(chunks), "tensor_message": 1} if hides else {}
        self.engine = Engine(
            GPT(work.model, 1),
            groups,
            [range(work.model.layers + 2)],
            self.batch,
            1,
            OptimizerConfig(learning_rate=1e-3),
            seed=1,
            dtype=torch.float32,
            device=CPU,
            recorder=self.recorder,
            overlap=OverlapConfig.model_validate({"tensor": kind if hides else None} | keys),
        )
        if setting == COMPUTE:
            for layer in self.engine.model.stages[0].layers.values():
                assert isinstance(layer, SteppedLayer)
                layer.boundary = Silent(groups.grid.index("tp"))
        self.measured = Measured()

    def step(self) -> None:
        dist.barrier()
        self.recorder.take_totals()
        start = time.perf_counter()
        num_targets = self.work.sequences * self.work.model.sequence
        self.measured.loss = self.engine.train_step(lambda: self.batch, 1e-3, num_targets).loss
        self.measured.seconds.append(time.perf_counter() - start)
        self.measured.spans.append(self.recorder.take_totals())


def measure(work: Work, settings: list[str], repeats: int) -> dict[str, Measured]:
    """One rank's side."""
    groups = open_world(Layout(tp=RANKS, micro_batch=work.sequences), CPU)
    contenders = {setting: Contender(work, setting, groups) for setting in settings}
    for _ in range(repeats + 1):
        for contender in contenders.values():
            contender.step()
    for contender in contenders.values():
        contender.engine.close()
        del contender.measured.seconds[0], contender.measured.spans[0]
    close_world()
    return {setting: contender.measured for setting, contender in contenders.items()}


@dataclass(frozen=True)
class Row:
    """One setting at one rate."""

    rate: str
    block: str
    setting: str
    compute_seconds: float
    forward_seconds: float
    backward_seconds: float
    """Parts of ``compute_seconds``; what is left is the optimizer."""
    wire_seconds: float
    step_seconds: float
    off_seconds: float
    waited_seconds: float
    loss: float

    @property
    def speed_up(self) -> float:
        return self.off_seconds / self.step_seconds

    @property
    def of_bound(self) -> float:
        return max(self.compute_seconds, self.wire_seconds) / self.step_seconds

    @property
    def of_phases(self) -> float:
        phases = self.forward_seconds, self.backward_seconds
        return (
            self.compute_seconds + sum(max(0.0, self.wire_seconds / 2 - phase) for phase in phases)
        ) / self.step_seconds

    def line(self) -> str:
        compute, wire = self.compute_seconds, self.wire_seconds
        return (
            f"{self.rate:>9} {self.block:>9} {compute:8.3f} {wire:8.3f} {wire / compute:6.2f}"
            f" {self.setting:>9} {self.step_seconds:8.3f} {self.waited_seconds:8.3f}"
            f" {self.speed_up:8.2f} x {self.of_bound:8.0%} {self.of_phases:9.0%}  {self.loss:.6f}"
        )


HEADER = (
    f"{'rate':>9} {'block':>9} {'compute':>8} {'wire':>8} {'ratio':>6} {'setting':>9} {'step':>8}"
    f" {'waits':>8} {'speed-up':>10} {'of bound':>8} {'of phases':>9}  loss  (seconds)"
)


def rows_of(rate: str, work: Work, ranks: list[dict[str, Measured]]) -> Iterator[Row]:
    """Every setting but the one that only computes."""
    wire = 0.0 if rate == "unshaped" else 8 * work.bytes_sent() / bits_per_second(rate)
    seconds = {}
    for setting in ranks[0]:
        steps = zip(*(rank[setting].seconds for rank in ranks), strict=True)
        seconds[setting] = min(max(step) for step in steps)
    for setting, step_seconds in seconds.items():
        if setting != COMPUTE:
            yield Row(
                rate,
                work.model.block,
                setting,
                seconds[COMPUTE],
                ranks[0][COMPUTE].least("forward"),
                ranks[0][COMPUTE].least("backward"),
                wire,
                step_seconds,
                seconds[OFF],
                ranks[0][setting].least("tensor_comm"),
                ranks[0][setting].loss,
            )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["unshaped", "1gbit", "400mbit", "200mbit"])
    parser.add_argument("--blocks", nargs="+", default=["serial", "parallel"])
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["turns:2", "turns:4", "slices:2", "slices:4"],
        help="values of overlap.tensor and overlap.tensor_chunks",
    )
    for name, default in (("layers", 6), ("hidden", 512), ("sequence", 256), ("sequences", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small model, two rates, two repeats")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each row instead of the table"
    )
    settings = parser.parse_args()
    if settings.quick:
        settings.layers, settings.repeats, settings.rates = 2, 2, ["1gbit", "400mbit"]
    return settings


def main() -> None:
    """Measures and prints."""
    settings = parse()
    if not settings.json:
        print(HEADER)
    for rate in settings.rates:
        for block in settings.blocks:
            model = ModelConfig(
                layers=settings.layers,
                hidden=settings.hidden,
                heads=max(2, settings.hidden // 64),
                sequence=settings.sequence,
                vocabulary=settings.vocabulary,
                block=block,
            )
            work = Work(model, settings.sequences)
            with Hosts(RANKS, None if rate == "unshaped" else rate) as hosts:
                names = [COMPUTE, OFF, *settings.settings]
                ranks = hosts.run_ranks(measure, work, names, settings.repeats, timeout_seconds=3600)
            for row in rows_of(rate, work, ranks):
                print(json.dumps(asdict(row)) if settings.json else row.line(), flush=True)


if __name__ == "__main__":
    main()
