"""If these break, ranks with GPUs that share sequences attend otherwise than ranks on CPUs: one launch of
Triton's kernels for a list of pieces, in the interpreter, against plain tiles of scores."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from test_kernel_operators import normal

from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, PieceGradients, join_pieces
from myriad.kernels.config import Kernels
from myriad.kernels.documents import Documents
from myriad.kernels.ring_attention import ring_attention
from myriad.kernels.ring_plan import Piece, Pieces, ring_plan
from myriad.kernels.triton import launch as launching


@st.composite
def piece_lists(draw: st.DrawFn, batch: int, num_queries: int, num_keys: int, window: int) -> Pieces:
    """Pieces that may share queries and keys; some queries are in none, or see no key."""
    found = []
    for rows in draw(st.sampled_from([[slice(None)], [slice(row, row + 1) for row in range(batch)]])):
        for _ in range(draw(st.integers(0, 3))):
            (first, stop), (start, end) = (
                sorted(draw(st.tuples(st.integers(0, most), st.integers(0, most))))
                for most in (num_queries, num_keys)
            )
            piece = Piece(rows, slice(first, stop), slice(start, end), draw(st.integers(-40, 80)), window)
            found += [piece] if first < stop and start < end else []
    return Pieces(found)


def strided(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that lie in another order than their shape says, a head's own together."""
    batch, sequence, heads, width = shape
    return normal(sequence, heads, batch, width + 3, dtype=dtype, seed=seed)[..., :width].permute(2, 0, 1, 3)


def joined_of(steps: list[Pieces], q: Any, keys: list[Any], how: Scores, kernels: Kernels) -> Joined:
    joined = Joined.nothing(q)
    for pieces, both in zip(steps, keys, strict=True):
        join_pieces(joined, q, *both, pieces, how, kernels)
    return joined


def gradients_of(
    steps: list[Pieces], inputs: list[Any], keys: list[Any], joined: Joined, how: Scores, kernels: Kernels
) -> list[torch.Tensor]:
    """Gradients of the queries, and of the keys and values of each step, added to ones."""
    gradients, sums = PieceGradients(*inputs, joined, how, kernels), []
    for pieces, both in zip(steps, keys, strict=True):
        sums.append(torch.ones(both.shape))
        gradients.add(pieces, *both, *sums[-1])
    return [gradients.of_queries, *sums]


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    st.integers(1, 80),
    st.integers(1, 2),
    st.sampled_from([(1, 1, 16), (4, 2, 16), (2, 1, 80)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([Scores(), Scores(0.3, softcap=1.5)]),
)
def test_a_list_of_pieces_is_computed_as_tiles_of_scores(data, window, batch, heads, dtype, how) -> None:
    """Two lists with keys of their own: the second one is joined to the results of the first."""
    num_queries = data.draw(st.integers(1, 70))
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=2))
    steps = [data.draw(piece_lists(batch, num_queries, size, window)) for size in sizes]
    num_heads, num_kv_heads, width = heads
    wave, q = (strided(batch, num_queries, num_heads, width, dtype=dtype, seed=seed) for seed in (1, 2))
    keys = [
        torch.stack([strided(batch, size, num_kv_heads, width, dtype=dtype, seed=seed) for seed in (3, 4)])
        for size in sizes
    ]
    wide = [one.float() for one in keys]  # the library's kernel of a CPU rounds scores to the type
    right = joined_of(steps, q.float(), wide, how, "plain")
    expected = [*right, *gradients_of(steps, [wave.float(), q.float()], wide, right, how, "plain")]
    found = joined_of(steps, q, keys, how, "triton")
    gradients = gradients_of(steps, [wave, q], keys, right, how, "triton")
    for one, other in zip([*found, *gradients], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


class Alone:
    """A ring of one rank."""

    rank, size = 0, 1

    def start_shift(self, *halves: object) -> None:
        """Nothing travels."""

    def block(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


def test_packed_documents_are_one_launch_and_as_if_each_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, launches, window = [[20, 1, 14, 5], [40]], [], 9
    monkeypatch.setattr(
        launching,
        "launch",
        lambda kernel, *rest, run=launching.launch, **options: (
            launches.append(kernel.fn.__name__),
            run(kernel, *rest, **options),
        ),
    )
    q, k, v, wave = (normal(2, 40, heads, 16, dtype=torch.float32, seed=heads) for heads in (4, 2, 2, 4))
    sinks = normal(4, dtype=torch.float32, seed=8)
    leaves = [one.requires_grad_() for one in (q, k, v, sinks)]
    rows = []
    for row, own in enumerate(lengths):
        each = zip(*(one[row : row + 1].split(own, 1) for one in (q, k, v)), strict=True)
        rows.append(torch.cat([attention_reference(*one, window, Scores(), sinks) for one in each], 1))
    expected = [torch.cat(rows)]
    expected += torch.autograd.grad(expected[0], leaves, wave)
    plan = ring_plan(40, window, 0, 1, Documents(torch.empty(0), lengths))
    again = []
    for _ in range(2):
        out = ring_attention(q, k, v, plan, Alone(), Scores(), sinks, kernels="triton")
        again.append([out, *torch.autograd.grad(out, leaves, wave)])
    for one, other, right in zip(*again, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=2e-5)
        assert torch.equal(one, other)
    both_halves = 2 * ["backward_keys", "backward_queries"]  # some own keys first, the rest last
    assert launches == 2 * ["forward", "row_products", *both_halves]
