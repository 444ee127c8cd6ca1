"""What benchmarks of steps with experts share: tokens, the exchanges of a step alone, a step without them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from myriad.model.boundary import Arrived, Arriving
from myriad.parallel import expert_exchange
from myriad.parallel.batch import Batch
from myriad.parallel.expert_exchange import ExpertPeers, start_rows

__all__ = ["Exchanged", "exchange_alone", "random_batch", "recording", "slowest_seconds", "stays"]


def random_batch(sequences: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Return sequences of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, length + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(inputs, targets, torch.arange(sequences))


Exchanged = tuple[ExpertPeers, int, Sequence[int], Sequence[int]]
"""Peers, values of a row, rows for each peer, and rows from each."""


@contextmanager
def recording(into: list[Exchanged]) -> Iterator[None]:
    """Append the exchanges of rows of this rank, in their order."""
    plain = expert_exchange._Rows

    class Recorded(plain):  # type: ignore[misc, valid-type]
        def __init__(
            self, rows: torch.Tensor, peers: ExpertPeers, leaving: Sequence[int], arriving: Sequence[int]
        ) -> None:
            super().__init__(rows, peers, leaving, arriving)
            into.append((peers, rows.shape[1], leaving, arriving))

    expert_exchange._Rows = Recorded  # type: ignore[misc]
    try:
        yield
    finally:
        expert_exchange._Rows = plain  # type: ignore[misc]


@torch.no_grad()
def exchange_alone(exchanges: Sequence[Exchanged]) -> None:
    """Run the exchanges without any compute, two in flight."""
    in_flight = deque[Arriving]()
    for peers, values, leaving, arriving in exchanges:
        if len(in_flight) == 2:
            in_flight.popleft().wait()
        in_flight.append(start_rows(torch.empty(sum(leaving), values), peers, leaving, arriving, None))
    for arrives in in_flight:
        arrives.wait()


def stays(
    rows: torch.Tensor, leaving: Sequence[int], arriving: Sequence[int], hop: int | None = None
) -> Arriving:
    """Return as many rows as would arrive, of which none travelled."""
    number = sum(arriving)
    repeated = rows if number <= len(rows) else rows.repeat(-(-number // max(1, len(rows))), 1)
    return Arrived(repeated[:number])


def slowest_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)
