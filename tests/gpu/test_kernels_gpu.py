"""If these break, Triton's kernels compute on a real GPU something else than in the interpreter. Skipped
where there is no CUDA device."""

import pytest
import torch

from myriad.kernels.agreement import LIMITS, disagreements, float8_disagreements, library_disagreements
from myriad.kernels.attention import attention
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, PieceGradients, join_pieces
from myriad.kernels.config import Kernels
from myriad.kernels.documents import Documents
from myriad.kernels.float8 import multiplies_float8
from myriad.kernels.ring_plan import Piece, Pieces
from myriad.kernels.rotary import Rotary, rotary_turns

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(300, 1000), (1, 8192), (4097, 64)])
def test_kernels_give_what_the_formulas_predict(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    found = disagreements(dtype, torch.device("cuda", 0), rows, width)
    assert all(share <= LIMITS[dtype] for share in found.values()), found


def test_the_same_values_twice_give_the_same_bits() -> None:
    device = torch.device("cuda", 0)
    assert disagreements(torch.float32, device) == disagreements(torch.float32, device)


def test_float8_operands_are_those_of_a_cpu_to_the_bit() -> None:
    device = torch.device("cuda", 0)
    if not multiplies_float8(device):
        pytest.skip("needs a GPU with float8")
    assert float8_disagreements(device)["float8"] <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_s_products_and_attention_are_right(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    takes_float8 = dtype == torch.bfloat16 and multiplies_float8(device)
    for scaling in ("tensor", "blocks") if takes_float8 else (None,):
        found = library_disagreements(dtype, device, scaling=scaling)
        assert all(share <= LIMITS[dtype] for share in found.values()), found


@pytest.mark.parametrize(
    ("window", "kernels", "how"),
    [(None, "auto", Scores()), (100, "auto", Scores()), (100, "triton", Scores(softcap=3.0))],
)
def test_documents_attend_in_one_call_as_they_do_regrouped(
    window: int | None, kernels: Kernels, how: Scores
) -> None:
    """The library's call, and Triton's kernels with bounded scores and sinks."""
    torch.manual_seed(1)
    sinks = None if how.softcap is None else torch.randn(8)
    heads, lengths = Heads(8, 2, 64), [[300, 1, 211], [512]]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    fused = torch.randn(2, 512, 12 * 64)
    turns = rotary_turns(Rotary(1e4, 64), 512, fused.device)
    found = []
    for x in (fused.cuda().bfloat16(), fused.double()):
        x.requires_grad_()
        documents = Documents(positions.to(x.device), lengths)
        own = None if sinks is None else sinks.to(x.device)
        by: Kernels = kernels if x.is_cuda else "plain"
        out = attention(x, heads, window, turns.to(x.device), by, how, own, documents)
        out.sum().backward()
        found.append((out.detach().cpu().double(), x.grad.cpu().double()))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= LIMITS[torch.bfloat16] * other.norm()


def attended(
    steps: list[tuple[slice, Pieces]], values: list[torch.Tensor], how: Scores, kernels: Kernels
) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values, of which each step has some, on the host."""
    q, k, v, wave = values
    joined, sums = Joined.nothing(q), torch.zeros(2, *k.shape, device=q.device)
    for keys, pieces in steps:
        join_pieces(joined, q, k[:, keys], v[:, keys], pieces, how, kernels)
    gradients = PieceGradients(wave, q, joined._replace(out=joined.out.to(q.dtype)), how, kernels)
    for keys, pieces in steps:
        gradients.add(pieces, k[:, keys], v[:, keys], *sums[:, :, keys])
    return [one.cpu() for one in (*joined, gradients.of_queries, *sums)]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "how", "width"),
    [(1000, Scores(), 64), (1000, Scores(0.1), 80), (70, Scores(softcap=3.0), 128)],
)
def test_pieces_of_shared_sequences_give_what_a_cpu_computes(
    kernels: Kernels, dtype: torch.dtype, window: int, how: Scores, width: int
) -> None:
    """Plain kernels are the library's FlashAttention where no window cuts a piece, and tiles of scores. The
    second half of the queries sees the first half of the keys after its own, and some of it nothing."""
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    everywhere, first, second = slice(None), slice(0, 200), slice(200, 400)
    own = [Piece(everywhere, half, half, 0, window) for half in (first, second)]
    others = [Piece(everywhere, second, first, 200, window)]
    steps = [(slice(0, 400), Pieces(own)), (first, Pieces(others))]
    values = [torch.randn(2, 400, heads, width).to(dtype) for heads in (4, 2, 2, 4)]
    expected = attended(steps, [one.float() for one in values], how, "plain")
    device = [one.cuda() for one in values]
    found, again = (attended(steps, device, how, kernels) for _ in range(2))
    for one, other, right in zip(found, again, expected, strict=True):
        assert (one.float() - right).norm() <= LIMITS[dtype] * right.norm()
        assert kernels == "plain" or torch.equal(one, other)
