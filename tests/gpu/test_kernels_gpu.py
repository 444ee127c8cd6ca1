"""If these break, Triton's kernels compute on a real GPU something else than in the interpreter. Skipped
where there is no CUDA device."""

import pytest
import torch

from myriad.kernels.agreement import LIMITS, disagreements, float8_disagreements, library_disagreements
from myriad.kernels.attention import attention
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.documents import Documents
from myriad.kernels.float8 import multiplies_float8
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


@pytest.mark.parametrize("window", [None, 100])
def test_the_library_attends_inside_documents_as_the_regrouping_does(window: int | None) -> None:
    torch.manual_seed(1)
    heads, lengths = Heads(8, 2, 64), [[300, 1, 211], [512]]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    fused = torch.randn(2, 512, 12 * 64)
    turns = rotary_turns(Rotary(1e4, 64), 512, fused.device)
    found = []
    for x in (fused.cuda().bfloat16(), fused.double()):
        x.requires_grad_()
        documents = Documents(positions.to(x.device), lengths)
        out = attention(x, heads, window, turns.to(x.device), documents=documents)
        out.sum().backward()
        found.append((out.detach().cpu().double(), x.grad.cpu().double()))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= LIMITS[torch.bfloat16] * other.norm()
