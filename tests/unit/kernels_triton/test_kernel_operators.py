"""If these break, a GPU computes something else than the formulas say. The kernels run in Triton's
interpreter, against the same formulas in float64: odd sizes, memory that is not in order, no rows, NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from myriad.kernels.activation import activate
from myriad.kernels.attention import split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from myriad.kernels.gradient import GradientSink, PendingRows, set_sink
from myriad.kernels.norm import LayerNorm, RMSNorm
from myriad.kernels.rotary import Rotary, rotary_reference, rotary_turns
from myriad.kernels.triton import norm_kernels
from myriad.model.boundary import Boundary

TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest difference, as a share of the largest value: about two roundings."""


def clamped(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (value.clamp(-7, 7) + 1)


FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "clamped_swiglu": lambda x: clamped(*x.chunk(2, -1)),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu_tanh": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What it gives, and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    waves = [normal(*y.shape, dtype=y.dtype, seed=9) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, waves)]


def assert_close(found, expected, dtype: torch.dtype) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = other.double().nan_to_num().abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(
            one.double(), other.double(), rtol=0, atol=LIMITS[dtype] * max(largest, 1.0), equal_nan=True
        )


def doubles(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return [x.double() for x in inputs]


def make_norm(name: str, width: int, dtype: torch.dtype, kernels: str) -> torch.nn.Module:
    made = RMSNorm(width, 1e-5, kernels=kernels) if name == "rms" else None
    made = made or LayerNorm(width, 1e-5, bias=name == "layer with bias", kernels=kernels)
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(width, dtype=torch.float32, seed=seed))
    return made.to(dtype)


NORMS = st.sampled_from(["rms", "layer", "layer with bias"])


@settings(max_examples=12, deadline=None)
@given(NORMS, st.integers(0, 9), st.sampled_from([5, 31, 64, 130]), TYPES)
def test_norm(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    x = normal(rows, width, dtype=dtype, seed=3)
    ours, formula = (
        make_norm(name, width, kind, kernels)
        for kind, kernels in ((dtype, "triton"), (torch.double, "plain"))
    )
    assert_close(results(ours, x), results(formula, x.double()), dtype)


@settings(max_examples=10, deadline=None)
@given(NORMS, TYPES, st.booleans())
def test_norm_of_a_sum_is_the_sum_and_its_norm_with_all_gradients(name, dtype, has_one_use) -> None:
    """Serial blocks add attention to the residual stream and normalise it for the MLP."""
    width = 24
    x, branch = (normal(2, 6, width, dtype=dtype, seed=seed)[:, ::2] for seed in (1, 2))  # rows apart
    ours = make_norm(name, width, dtype, "triton")
    formula = make_norm(name, width, torch.double, "plain")

    def add(norm, *inputs):
        stream, y = norm.add(*inputs)
        return y if has_one_use else (stream, y)

    found = results(lambda *inputs: add(ours, *inputs), x, branch)
    expected = results(lambda *inputs: add(formula, *inputs), *doubles(x, branch))
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms", "layer with bias"])
def test_norm_made_again_from_the_stream_has_the_bits_of_the_fused_one(name, dtype) -> None:
    """layout.recompute = "selective" makes a norm's output again in the backward."""
    norm = make_norm(name, 40, dtype, "triton")
    stream, y = norm.add(normal(7, 40, dtype=dtype, seed=1), normal(7, 40, dtype=dtype, seed=2))
    assert torch.equal(norm(stream), y)


@pytest.mark.parametrize("name", ["rms", "layer", "layer with bias"])
@pytest.mark.parametrize(("rows", "width"), [(0, 40), (1, 16), (7, 40), (12, 129)])
def test_rows_too_wide_for_registers_are_normalised_in_blocks(
    name: str, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hidden size above 16,384 is; here blocks have 16 columns. Rows that no pair of rows divides, rows
    that no block divides, several rows for a program."""
    monkeypatch.setattr(norm_kernels, "_WIDEST", {"forward": 8, "backward": 8})
    monkeypatch.setattr(norm_kernels, "_WIDE", 16)
    ours = make_norm(name, width, torch.float32, "triton")
    formula = make_norm(name, width, torch.double, "plain")
    x, branch = (normal(rows, width, dtype=torch.float32, seed=seed) for seed in (1, 2))
    pending = PendingRows()
    sinks = [GradientSink(torch.zeros(width), pending=pending) for _ in ours.parameters()]
    for parameter, sink in zip(ours.parameters(), sinks, strict=True):
        set_sink(parameter, sink)
    leaves, exact = (
        [v.to(kind, copy=True).requires_grad_() for v in (x, branch)] for kind in (x.dtype, torch.double)
    )
    again = ours(torch.add(x, branch))
    for norm, inputs in ((ours, leaves), (formula, exact)):
        for _ in range(2):
            stream, y = norm.add(*inputs)
            assert norm is formula or torch.equal(y, again), "fused with the sum, the same bits"
            (stream.sin().sum() + y.square().sum()).backward()
    pending.add_up()
    assert_close([v.grad for v in leaves], [v.grad for v in exact], torch.float32)
    assert_close([sink.total for sink in sinks], [p.grad for p in formula.parameters()], torch.float32)


def test_norm_s_weights_learn_what_the_formula_s_do() -> None:
    ours, formula = (
        make_norm("layer with bias", 33, kind, kernels)
        for kind, kernels in ((torch.float32, "triton"), (torch.double, "plain"))
    )
    x, wave = normal(11, 33, dtype=torch.float32), normal(11, 33, dtype=torch.float32, seed=5)
    (ours(x) * wave).sum().backward()
    (formula(x.double()) * wave.double()).sum().backward()
    pairs = zip(ours.parameters(), formula.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(NORMS, min_size=1, max_size=3), st.integers(0, 9), st.sampled_from([5, 31, 130]), st.booleans()
)
def test_norms_that_leave_their_sums_to_the_next_one_learn_the_same(
    names: list[str], rows: int, width: int, starts_late: bool
) -> None:
    """A stage's norms share one place for partial sums: the next backward adds up what is there, and the
    stage's end what is left. Two backwards, as of two parts of a micro-batch."""
    first = int(starts_late)  # the first norm adds up by itself: no other one may take its sums for a place

    def learned(pending: PendingRows | None) -> list[torch.Tensor]:
        norms = [make_norm(name, width, torch.float32, "triton") for name in names]
        parameters = [
            (p, pending if i >= first else None) for i, n in enumerate(norms) for p in n.parameters()
        ]
        sinks = [GradientSink(torch.full_like(p, 0.5), pending=place) for p, place in parameters]
        for (parameter, _), sink in zip(parameters, sinks, strict=True):
            set_sink(parameter, sink)
        for seed in (3, 4):
            x = normal(rows, width, dtype=torch.float32, seed=seed).requires_grad_()
            torch.nn.Sequential(*norms)(x).square().sum().backward()
        if pending is not None:
            pending.add_up()
            assert pending.sums is None
        return [sink.total for sink in sinks]

    assert_close(learned(PendingRows()), learned(None), torch.float32)


def test_a_nan_spoils_its_own_row_only() -> None:
    x = normal(5, 16, dtype=torch.float32)
    x[2, 7] = torch.nan
    for function in (
        make_norm("rms", 16, torch.float32, "triton"),
        lambda x: activate("relu2", x, kernels="triton"),
        lambda x: activate("swiglu", x, kernels="triton"),
    ):
        spoiled = function(x).isnan().any(1)
        assert spoiled.tolist() == [False, False, True, False, False]


@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.integers(0, 7),
    st.sampled_from([2, 6, 34, 2050]),
    TYPES,
    st.booleans(),
)
def test_activation(name: str, rows: int, width: int, dtype: torch.dtype, has_bias: bool) -> None:
    if width > 100:
        rows = min(rows, 2)  # two stripes of columns
    x = normal(rows, 2 * width, dtype=dtype)[:, :width]  # rows further apart than they are wide
    x = x * (6 if name == "clamped_swiglu" else 2)  # some beyond its bounds
    inputs = [x, normal(width, dtype=dtype, seed=1)][: 1 + has_bias]
    found = results(lambda *inputs: activate(name, *inputs, kernels="triton"), *inputs)
    expected = results(lambda x, bias=0.0: FORMULAS[name](x + bias), *doubles(*inputs))
    assert_close(found, expected, dtype)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 2),
    st.sampled_from([2, 6, 24]),
    TYPES,
)
def test_rotary(batch: int, sequence: int, share: int, kv: int, width: int, dtype: torch.dtype) -> None:
    """Queries and keys are turned, values are not; gradients come as attention gives them, heads first."""
    heads = Heads(share * kv, kv, width)
    fused = normal(batch, sequence, (share + 2) * kv * width, dtype=dtype)
    turns = rotary_turns(Rotary(100.0, width), sequence, fused.device)

    def split(x: torch.Tensor) -> torch.Tensor:
        parts = split_heads(x, heads, turns, "triton")
        return torch.cat([part.transpose(1, 2) for part in parts], 1)

    def formula(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(2, (-1, width))
        turning = (share + 1) * kv
        return torch.cat([rotary_reference(x[:, :, :turning], 100.0), x[:, :, turning:]], 2).transpose(1, 2)

    assert_close(results(split, fused), results(formula, fused.double()), dtype)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 12), st.sampled_from([(8, 8), (8, 5), (70, 66)]), st.sampled_from([1, 5, 64]), TYPES)
def test_cross_entropy(num_tokens: int, rows_and_vocabulary, chunk: int, dtype: torch.dtype) -> None:
    rows, vocabulary = rows_and_vocabulary
    x, weight = normal(num_tokens, 6, dtype=dtype), normal(rows, 6, dtype=dtype, seed=1)
    targets = torch.randint(vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(2))
    found = results(
        lambda x, weight: linear_cross_entropy(x, weight, targets, Boundary(), vocabulary, chunk, "triton"),
        x,
        weight,
    )
    expected = results(
        lambda x, weight: linear_cross_entropy_reference(x, weight, targets, vocabulary), *doubles(x, weight)
    )
    assert_close(found, expected, dtype)


class _Told:
    """What all ranks contributed, after each has run once."""

    def __init__(self, told: list[torch.Tensor]) -> None:
        self.told = told

    def wait(self) -> torch.Tensor:
        return torch.stack(self.told)


class _Rank:
    """A rank of three that share a vocabulary; the ranks run one after another."""

    size = 3

    def __init__(self, rank: int, others: list[torch.Tensor]) -> None:
        self.rank, self.others = rank, others

    def start_stack(self, x: torch.Tensor) -> _Told:
        if len(self.others) < self.size:  # the first round only asks
            self.others.append(x)
            return _Told([x] * self.size)
        return _Told(self.others)


def test_cross_entropy_over_ranks_of_which_the_last_has_nothing_but_padding() -> None:
    x, weight = normal(5, 4, dtype=torch.float32), normal(12, 4, dtype=torch.float32, seed=1)
    targets, told = torch.tensor([0, 3, 4, 7, 6]), []
    for rank in range(3):
        linear_cross_entropy(x, weight[4 * rank :][:4], targets, _Rank(rank, told), 8, 512, "triton")
    loss, grad_x, grad_weight = results(
        lambda x, weight: linear_cross_entropy_reference(x, weight, targets, 8), x.double(), weight.double()
    )
    parts = [
        results(
            lambda x, weight, rank=rank: linear_cross_entropy(
                x, weight, targets, _Rank(rank, told), 8, 512, "triton"
            ),
            x,
            weight[4 * rank :][:4],
        )
        for rank in range(3)
    ]
    for found, expected in (
        (parts[0][0], loss),
        (sum(part[1] for part in parts), grad_x),
        (torch.cat([part[2] for part in parts]), grad_weight),
    ):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    assert parts[0][0] == parts[1][0] == parts[2][0]
