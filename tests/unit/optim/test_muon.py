"""If these fail, Muon is not the optimizer that others call so, or its work is not shared."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.optim.config import OptimizerConfig
from myriad.optim.matrix_owners import assign_owners, newton_schulz_flops
from myriad.optim.muon import MatrixPart, Muon, newton_schulz, newton_schulz_dtype
from myriad.optim.region import Region

SHAPES = ((48, 16), (16, 48), (24, 24))
RATES = (1e-2, 2e-2, 5e-3)


def whole_parts(region: Region) -> list[MatrixPart]:
    """The matrices of a region that one rank holds."""
    found, start = [], 0
    for shape in SHAPES:
        inside = slice(start, start + shape[0] * shape[1])
        found.append(
            MatrixPart(region.values[inside].view(shape), region.gradients[inside].view(shape), shape)
        )
        start = inside.stop
    return found


def step(optimizer: Muon, parts: list[MatrixPart], rate: float, dtype: torch.dtype) -> None:
    optimizer.begin(rate, 0.5)
    optimizer.write_directions([0, 1])
    for part in parts:
        part.update.copy_(newton_schulz(part.update.to(dtype, copy=True), optimizer.config.muon_iterations))
    optimizer.update([0, 1])
    optimizer.end()


@pytest.mark.parametrize(
    ("scaling", "nesterov"), [("match_rms_adamw", True), ("original", True), ("match_rms_adamw", False)]
)
def test_matrices_move_as_torch_s_muon_moves_them_and_vectors_as_its_adamw(
    scaling: Literal["match_rms_adamw", "original"], nesterov: bool
) -> None:
    config = OptimizerConfig(
        name="muon", muon_scaling=scaling, muon_nesterov=nesterov, muon_momentum=0.9, muon_iterations=4
    )
    torch.manual_seed(3)
    size, vector = sum(rows * columns for rows, columns in SHAPES), torch.randn(10)
    values = torch.randn(size)
    regions = [
        Region(values.clone(), torch.zeros(size), decays=True, pieces=(), orthogonalized=True),
        Region(vector.clone(), torch.zeros(10), decays=False, pieces=()),
    ]
    parts = whole_parts(regions[0])
    optimizer = Muon(config, regions, [parts, []])
    matrices = [part.values.clone() for part in parts]
    theirs = torch.optim.Muon(
        matrices, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=scaling
    )
    adamw = torch.optim.AdamW([vector], betas=(config.beta1, config.beta2), weight_decay=0.0)
    for rate in RATES:
        gradients = [torch.randn(shape) for shape in SHAPES]
        regions[0].gradients.copy_(torch.cat([2 * one.flatten() for one in gradients]))
        vector.grad = torch.randn(10)
        regions[1].gradients.copy_(2 * vector.grad)
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient
        theirs.param_groups[0]["lr"] = adamw.param_groups[0]["lr"] = rate
        step(optimizer, parts, rate, torch.bfloat16)
        theirs.step()
        adamw.step()
    for part, matrix in zip(parts, matrices, strict=True):
        torch.testing.assert_close(part.values, matrix, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(regions[1].values, vector, rtol=1e-6, atol=1e-6)
    sizes = {name: [len(one) for one in tensors] for name, tensors in optimizer.state().items()}
    assert sizes == {"exp_avg": [size, 10], "exp_avg_sq": [0, 10]}, "a matrix has one moment"


@pytest.mark.parametrize("shape", SHAPES)
def test_all_singular_values_come_close_to_one_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(5)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = left.T @ newton_schulz(left * values @ right, 5) @ right.T
    diagonal = found.diagonal()
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    torch.testing.assert_close(found, torch.diag(diagonal), rtol=0.0, atol=1e-4)


def test_the_type_follows_the_training_unless_it_is_given() -> None:
    assert newton_schulz_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert newton_schulz_dtype("auto", torch.float16) == torch.float32
    assert newton_schulz_dtype("auto", torch.float32) == torch.float32
    assert newton_schulz_dtype("float32", torch.bfloat16) == torch.float32


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8), max_size=4),
    st.integers(1, 5),
)
def test_no_rank_orthogonalizes_more_than_its_share_and_one_matrix(
    chunks: list[list[tuple[int, int]]], ranks: int
) -> None:
    loads, done = [0.0] * ranks, [0.0] * ranks
    for shapes in chunks:
        costs = [newton_schulz_flops(*shape, 5) for shape in shapes]
        here = [0.0] * ranks
        for owner, cost in zip(assign_owners(costs, loads), costs, strict=True):
            here[owner] += cost
            done[owner] += cost
        assert max(here) <= sum(costs) / ranks + max(costs, default=0.0)
    assert loads == pytest.approx(done)
