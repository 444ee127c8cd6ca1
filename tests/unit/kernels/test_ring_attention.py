"""If these fail, ranks that share sequences miss a pair of positions or count one twice, and models learn
something else than on one rank."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, piece_backward, piece_forward
from myriad.kernels.document_shares import DocumentSharing, document_parts
from myriad.kernels.documents import Documents
from myriad.kernels.ring_attention import ring_attention
from myriad.kernels.ring_plan import (
    Piece,
    RingPlan,
    halves_sent,
    received_positions,
    ring_plan,
    ring_ranges,
    sends_what_is_seen,
)
from myriad.kernels.tile_tables import are_short
from myriad.model.context_share import share_of

SIZES = st.sampled_from([1, 2, 3, 4])
WINDOWS = st.none() | st.integers(1, 40)


class Messages:
    def __init__(self, pairs: "list[tuple[torch.Tensor, SimpleQueue[torch.Tensor]]]") -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for room, queue in self._pairs:
            room.copy_(queue.get(timeout=20))


class Thread:
    """One rank of a ring of threads."""

    def __init__(self, rank: int, queues: "list[list[SimpleQueue[torch.Tensor]]]") -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues
        self.num_sent = 0

    def start_shift(self, leaving: torch.Tensor, arriving: torch.Tensor, step: int) -> Messages:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        assert leaving.is_contiguous() and arriving.is_contiguous()
        arriving.fill_(torch.nan)
        if leaving.numel():
            self._queues[self.rank][after].put(leaving.clone())
        self.num_sent += leaving.numel()
        return Messages([(arriving, self._queues[before][self.rank])] if arriving.numel() else [])

    def start_exchange(
        self, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
    ) -> Messages:
        for rank, x in leaving.items():
            self._queues[self.rank][rank].put(x.clone())
            self.num_sent += x.numel()
        return Messages([(x, self._queues[rank][self.rank]) for rank, x in arriving.items()])

    def block(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


def on_ring(size: int, function: Callable[[Thread], Any]) -> list[Any]:
    """What the function gives on each rank."""
    queues = [[SimpleQueue[torch.Tensor]() for _ in range(size)] for _ in range(size)]
    found, problems = {}, []

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
    return Documents(positions, lengths, draw(st.builds(DocumentSharing, WINDOWS, st.booleans())))


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
    arrived = {(rank, rank): own for rank, own in enumerate(everyone)}
    for rank, step in product(range(size), range(1, size)):
        plan, after = ring_plan(sequence, window, rank, size, inside), (rank + step) % size
        arrived[rank, after] = everyone[rank]
        if plan.sent is not None:
            message = plan.sent[step]
            assert message.length == ring_plan(sequence, window, after, size, inside).received[step]
            arrived[rank, after] = torch.full((2, message.length), -1)
            for part in message.parts:
                arrived[rank, after][part.rows, part.at] = everyone[rank][part.rows, part.places]
    for rank in range(size):
        plan, before = ring_plan(sequence, window, rank, size, inside), counts.sum()
        for step, pieces in enumerate(plan.steps):
            for piece in pieces:
                for row in range(2)[piece.rows]:
                    q = everyone[rank][row, piece.queries, None]
                    k = arrived[(rank - step) % size, rank][row, None, piece.keys]
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
    in_windows = {
        window: Documents(inside.positions, [lengths], DocumentSharing(window)) for window in (64, 512, 2048)
    }
    for packed in (None, inside, *in_windows.values()):
        pairs = [ring_plan(8192, None, rank, size, packed).num_pairs(1) for rank in range(size)]
        assert max(pairs) - min(pairs) <= 0.02 * max(pairs)
    for window in (None, 64, 512, 2048):
        packed = Documents(inside.positions, [lengths], DocumentSharing(window, whole=True))
        for seen in {None, window}:
            pairs = [ring_plan(8192, seen, rank, size, packed).num_pairs(1) for rank in range(size)]
            assert max(pairs) * size <= 1.08 * sum(pairs), f"whole documents, windows of {seen}"
    for window, packed in in_windows.items():
        pairs = [ring_plan(8192, window, rank, size, packed).num_pairs(1) for rank in range(size)]
        assert max(pairs) * size <= 1.04 * sum(pairs), window
    for length in (1024, 1536, 2048):
        alone = Documents(torch.empty(0), [[length]], DocumentSharing(1024))
        pairs = [ring_plan(length, 1024, rank, size, alone).num_pairs(1) for rank in range(size)]
        assert max(pairs) * size <= 1.04 * sum(pairs), f"one document of {length} positions"


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


CASES: list[tuple[int, int | None, Scores, bool, torch.dtype, list[list[int]] | None]] = [
    (2, None, Scores(), False, torch.float32, None),
    (3, 20, Scores(0.3), True, torch.float32, None),
    (4, 7, Scores(0.3), True, torch.float32, None),  # the rest send what is seen
    (4, 3, Scores(), False, torch.bfloat16, None),
    (3, 4, Scores(), True, torch.float32, [[36], [2, 20, 11, 3]]),
    (4, None, Scores(), False, torch.float32, [[3] * 16, [4] * 12]),
    (2, None, Scores(softcap=2.0), True, torch.float32, None),
    (2, None, Scores(), False, torch.bfloat16, None),
]


@pytest.mark.parametrize(("size", "window", "how", "has_sinks", "dtype", "lengths"), CASES)
def test_a_ring_attends_as_one_rank_does(
    size: int,
    window: int | None,
    how: Scores,
    has_sinks: bool,
    dtype: torch.dtype,
    lengths: list[list[int]] | None,
) -> None:
    sequence, generator = 12 * size, torch.Generator().manual_seed(1)
    sharing = DocumentSharing(window, whole=window is None)
    inside = None if lengths is None else Documents(torch.empty(0), lengths, sharing)
    q, k, v = (torch.randn(2, sequence, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    weights = torch.randn(2, sequence, 4, 8, generator=generator).to(dtype)
    leaves = [one for one in (q, k, v, sinks) if one is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    rows = []
    for row, own in enumerate(lengths or [[sequence]] * 2):
        heads = zip(*(one[row : row + 1].split(own, 1) for one in (q, k, v)), strict=True)
        rows.append(torch.cat([attention_reference(*each, window, how, sinks) for each in heads], 1))
    expected = torch.cat(rows)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    places = [
        share_of(sequence, rank, size, 1, inside).positions(torch.device("cpu")).expand(2, -1)
        for rank in range(size)
    ]

    def on_rank(ring: Thread) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        at = torch.arange(2)[:, None], places[ring.rank]
        own = [one.detach()[at].requires_grad_() for one in (q, k, v)]
        own_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
        plan = ring_plan(sequence, window, ring.rank, ring.size, inside)
        out = ring_attention(*own, plan, ring, how, own_sinks)
        taken = own if own_sinks is None else [*own, own_sinks]
        grads = torch.autograd.grad((out * weights[at]).sum(), taken)
        return out.detach(), list(grads), ring.num_sent

    ranks = on_ring(size, on_rank)
    tolerance = {"rtol": 0, "atol": 0.05 if dtype == torch.bfloat16 else 2e-5}
    at = torch.arange(2)[:, None], torch.cat(places, 1).argsort(1)
    torch.testing.assert_close(torch.cat([one[0] for one in ranks], 1)[at], expected.detach(), **tolerance)
    for number, one in enumerate(wanted[:3]):
        found = torch.cat([grads[number] for _, grads, _ in ranks], 1)[at]
        torch.testing.assert_close(found, one, **tolerance)
    if has_sinks:
        torch.testing.assert_close(sum(grads[3] for _, grads, _ in ranks), wanted[3], **tolerance)
    half, num_sent = q[:, : sequence // size, :2].numel(), [one[2] for one in ranks]
    whole = 6 * (size - 1) * half
    shared = DocumentSharing() if lengths is None else sharing
    direct = sends_what_is_seen(lengths or [[sequence]] * 2, window or sequence, size, shared)
    if direct:
        assert sum(num_sent) <= size * whole / 2
    elif lengths is None:
        halves = halves_sent(sequence, window, size)
        assert num_sent == [(2 * keys + sums) * half for keys, sums in halves] and max(num_sent) < whole
    else:
        assert num_sent == [whole] * size


def test_a_short_window_needs_two_neighbours_and_what_it_sees_of_them() -> None:
    for rank, after in ((0, {15: 99}), (7, {1: 99, 15: 99}), (15, {1: 99})):
        received = ring_plan(16 * 1024, 100, rank, 16).received
        assert {step: length for step, length in enumerate(received) if length} == after
    assert received_positions(16 * 1024, 100, 16) == 198
    assert received_positions(16 * 1024, 8 * 1024, 16) is None


def test_halves_that_no_further_rank_sees_do_not_travel() -> None:
    """The last chunk is seen by its own rank only; sums of second halves begin at rank 0."""
    assert halves_sent(64, None, 2) == [(1, 2), (2, 1)]
    assert halves_sent(64, None, 4) == [(5, 6), (5, 5), (5, 4), (6, 3)]


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


def test_short_pieces_have_tiles_of_their_size() -> None:
    """Four ranks cut documents of 512 positions into chunks of 64, half of a usual tile."""
    chunks = Documents(torch.empty(0), [[512] * 16])
    assert are_short(ring_plan(8192, None, 1, 4, chunks).steps[0])
    assert not are_short(ring_plan(8192, None, 1, 4).steps[0])
    assert not are_short(ring_plan(8192, 500, 1, 4).steps[0])


def test_short_documents_stay_on_one_rank_and_nothing_travels_for_them() -> None:
    """A long one is cut, and the one that fits on no rank is divided where a rank is full."""
    lengths = (4096, 1024, 1024, 1000, 500, 250, 250, 48)
    for whole, holders in ((False, [4] * 8), (True, [4, 1, 1, 1, 1, 1, 1, 2])):
        parts = document_parts(lengths, 4, DocumentSharing(None, whole))
        assert [sum(map(bool, own)) for own in zip(*parts, strict=True)] == holders
    short = Documents(torch.empty(0), [[256] * 32], DocumentSharing(None, whole=True))
    for rank in range(4):
        plan = ring_plan(8192, None, rank, 4, short)
        assert plan.sent is not None and sum(plan.received) == 0


def test_a_plan_of_documents_is_made_once() -> None:
    inside = Documents(torch.arange(16).repeat(1, 1), [[16]])
    plans: list[RingPlan] = [ring_plan(16, None, 0, 2, inside) for _ in range(2)]
    assert plans[0] is plans[1]
