"""If these fail, ranks that share sequences miss a pair of positions or count one twice, and models learn
something else than on one rank."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, Piece, piece_backward, piece_forward
from myriad.kernels.documents import Documents
from myriad.kernels.ring_attention import RingPlan, ring_attention, ring_plan, ring_ranges
from myriad.model.context_share import share_of

SIZES = st.sampled_from([1, 2, 3, 4])


class Arrived:
    def __init__(self, queue: "SimpleQueue[torch.Tensor]") -> None:
        self._queue = queue

    def wait(self) -> torch.Tensor:
        return self._queue.get(timeout=20)


class Thread:
    """One rank of a ring of threads."""

    def __init__(self, rank: int, queues: "list[SimpleQueue[torch.Tensor]]") -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues

    def start_shift(self, x: torch.Tensor) -> Arrived:
        self._queues[(self.rank + 1) % self.size].put(x.clone())
        return Arrived(self._queues[self.rank])


def on_ring(size: int, function: Callable[[Thread], Any]) -> list[Any]:
    """What the function gives on each rank."""
    queues, found, problems = [SimpleQueue[torch.Tensor]() for _ in range(size)], {}, []

    def run(rank: int) -> None:
        try:
            found[rank] = function(Thread(rank, queues))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    return [found[rank] for rank in range(size)]


@st.composite
def documents(draw: st.DrawFn, rows: int, sequence: int) -> Documents:
    lengths = []
    for _ in range(rows):
        cuts = sorted(draw(st.sets(st.integers(1, sequence - 1), max_size=4)))
        lengths.append([b - a for a, b in zip([0, *cuts], [*cuts, sequence], strict=True)])
    positions = torch.stack([torch.cat([torch.arange(one) for one in own]) for own in lengths])
    return Documents(positions, lengths)


@given(st.data(), SIZES, st.integers(1, 5), st.booleans())
def test_every_pair_that_a_query_sees_is_computed_once(
    data: st.DataObject, size: int, chunk: int, packed: bool
) -> None:
    sequence = 2 * size * chunk
    window = data.draw(st.none() | st.integers(1, sequence))
    inside = data.draw(documents(2, sequence)) if packed and sequence > 1 else None
    counts = torch.zeros(2, sequence, sequence, dtype=torch.int64)
    everyone = [
        share_of(sequence, rank, size, 1, inside).positions(torch.device("cpu")).expand(2, -1)
        for rank in range(size)
    ]
    assert {len(own[0]) for own in everyone} == {sequence // size}
    for rank in range(size):
        plan, before = ring_plan(sequence, window, rank, size, inside), counts.sum()
        for step, pieces in enumerate(plan.steps):
            for piece in pieces:
                for row in range(2)[piece.rows]:
                    q = everyone[rank][row, piece.queries, None]
                    k = everyone[(rank - step) % size][row, None, piece.keys]
                    assert int(q[0] - k[0, 0]) == piece.offset
                    sees = (k <= q) & (q - k < piece.window)
                    counts[row, q.expand_as(sees), k.expand_as(sees)] += sees
        assert plan.num_pairs(2) == counts.sum() - before
    q, k = torch.arange(sequence)[:, None], torch.arange(sequence)
    sees = ((k <= q) & (q - k < (window or sequence))).expand(2, -1, -1)
    if inside is not None:
        sees = sees & (q - k <= inside.positions[:, :, None])
    assert torch.equal(counts, sees.long())


def positions(sequence: int, rank: int, size: int) -> torch.Tensor:
    return torch.cat([torch.arange(*ends) for ends in ring_ranges(sequence, rank, size)])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_all_ranks_attend_to_about_equally_many_pairs(size: int) -> None:
    """With documents too: their lengths are of the usual kind, many short ones and a few long ones."""
    generator = torch.Generator().manual_seed(size)
    lengths: list[int] = []
    while (left := 8192 - sum(lengths)) > 0:
        lengths.append(min(left, int(500 * torch.randn((), generator=generator).exp()) + 1))
    inside = Documents(torch.cat([torch.arange(one) for one in lengths])[None], [lengths])
    for packed in (None, inside):
        pairs = [ring_plan(8192, None, rank, size, packed).num_pairs(1) for rank in range(size)]
        assert max(pairs) - min(pairs) <= 0.02 * max(pairs)


@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_shares_are_equal_and_disjoint_and_make_up_the_sequence(size: int, data: st.DataObject) -> None:
    ulysses = data.draw(st.sampled_from([one for one in (1, 2, 4, 8) if size % one == 0]))
    shares = [share_of(16 * size, rank, size, ulysses) for rank in range(size)]
    assert {share.length for share in shares} == {16}
    x = torch.arange(16 * size)[None]
    assert sorted(torch.cat([share.take(x)[0] for share in shares]).tolist()) == x[0].tolist()
    for share in shares:
        assert torch.equal(share.take(x)[0], share.positions(torch.device("cpu")))
    for row in range(size // ulysses):  # what a row exchanges is a place of the ring, in order
        own = torch.cat([share.take(x)[0] for share in shares[row * ulysses : (row + 1) * ulysses]])
        assert torch.equal(own, positions(16 * size, row, size // ulysses))


CASES: list[tuple[int, int | None, Scores, bool, torch.dtype]] = [
    (2, None, Scores(), False, torch.float32),
    (3, 7, Scores(0.3), True, torch.float32),
    (2, None, Scores(softcap=2.0), True, torch.float32),
    (2, None, Scores(), False, torch.bfloat16),
]


@pytest.mark.parametrize(("size", "window", "how", "has_sinks", "dtype"), CASES)
def test_a_ring_attends_as_one_rank_does(
    size: int, window: int | None, how: Scores, has_sinks: bool, dtype: torch.dtype
) -> None:
    sequence, generator = 12 * size, torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, sequence, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    weights = torch.randn(2, sequence, 4, 8, generator=generator).to(dtype)
    leaves = [one for one in (q, k, v, sinks) if one is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = attention_reference(q, k, v, window, how, sinks)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)

    def on_rank(ring: Thread) -> tuple[torch.Tensor, list[torch.Tensor]]:
        at = positions(sequence, ring.rank, ring.size)
        own = [one.detach()[:, at].requires_grad_() for one in (q, k, v)]
        own_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
        plan = ring_plan(sequence, window, ring.rank, ring.size)
        out = ring_attention(*own, plan, ring, how, own_sinks)
        taken = own if own_sinks is None else [*own, own_sinks]
        return out.detach(), list(torch.autograd.grad((out * weights[:, at]).sum(), taken))

    ranks = on_ring(size, on_rank)
    tolerance = {"rtol": 0, "atol": 0.05 if dtype == torch.bfloat16 else 2e-5}
    order = torch.cat([positions(sequence, rank, size) for rank in range(size)]).argsort()
    torch.testing.assert_close(
        torch.cat([out for out, _ in ranks], 1)[:, order], expected.detach(), **tolerance
    )
    for number, one in enumerate(wanted[:3]):
        found = torch.cat([grads[number] for _, grads in ranks], 1)[:, order]
        torch.testing.assert_close(found, one, **tolerance)
    if has_sinks:
        torch.testing.assert_close(sum(grads[3] for _, grads in ranks), wanted[3], **tolerance)


def test_the_librarys_kernel_and_scores_give_the_same_of_a_piece() -> None:
    """What the library has no kernel for is computed by scores, some queries at a time."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 10, heads, 8, generator=generator) for heads in (4, 2, 2))
    grad = torch.randn(q.shape, generator=generator)
    for offset in (0, 10):
        piece = Piece(slice(None), slice(0, 10), slice(0, 10), offset, 40)
        by_scores = Scores(softcap=1e6)  # so large that it bounds nothing
        fast, slow = (piece_forward(q, k, v, piece, how) for how in (Scores(), by_scores))
        torch.testing.assert_close(fast.out, slow.out, rtol=0, atol=1e-5)
        torch.testing.assert_close(fast.lse, slow.lse, rtol=0, atol=1e-5)
        joined = Joined(torch.randn(q.shape, generator=generator), fast.lse + 0.5)
        both = (piece_backward(grad, q, k, v, joined, piece, how) for how in (Scores(), by_scores))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_query_without_a_key_in_a_step_stays_finite() -> None:
    joined = Joined.nothing(torch.zeros(1, 4, 1, 8))
    piece = Piece(slice(None), slice(0, 4), slice(0, 4), 6, 4)  # the last queries see none of these keys
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8)
    joined.add(piece, piece_forward(q, k, k, piece, Scores()))
    joined.add(piece, piece_forward(q, k, k, piece, Scores()))
    assert bool(torch.isfinite(joined.out).all()) and joined.lse[0, -1, 0] == -torch.inf


def test_a_plan_of_documents_is_made_once() -> None:
    inside = Documents(torch.arange(16).repeat(1, 1), [[16]])
    plans: list[RingPlan] = [ring_plan(16, None, 0, 2, inside) for _ in range(2)]
    assert plans[0] is plans[1]
