"""What a GPU computes for float8 is what a CPU emulates, to the bit, with as little memory read and written
as the planner counts: the curve trained here is the one that would be trained there."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton.runtime import interpreter

from myriad.kernels.agreement import LIMITS, float8_disagreements
from myriad.kernels.float8 import BOTH, Float8, Form, KeptForms, Kind, Scaled, Scaling, scaled_reference, seen
from myriad.kernels.gradient import GradientSink, set_sink
from myriad.kernels.grouped import RowGroups, grouped_linear
from myriad.kernels.linear import linear
from myriad.kernels.triton.float8_kernels import add_product_of_blocks, product_of_blocks
from myriad.kernels.triton.scaling import largest
from myriad.kernels.triton.scaling import scaled as scaled_in_triton
from myriad.planner.cost.quantization_costs import float8_traffic

TYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
KINDS: list[Kind] = ["tensor", "lines", "squares"]
FORMS: list[tuple[Form, ...]] = [("rows",), ("columns",), BOTH]
Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


@pytest.fixture(scope="module", autouse=True)
def casts_round() -> Iterator[None]:
    """The interpreter's own cast to float8 loses the carry into the exponent (127.9 becomes 64) and cuts off
    what is below the normal numbers; a GPU's rounds, as PyTorch's does."""
    own = Builder.create_fp_to_fp

    def cast(self, source, kind, rounding):
        if str(kind.scalar) not in TYPES:
            return own(self, source, kind, rounding)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(TYPES[str(kind.scalar)])
        return Handle(values.view(torch.uint8).numpy(), kind.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builder, "create_fp_to_fp", cast)
        yield


def some(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different size, which do not lie side by side."""
    return (torch.randn(columns, rows).t() * 10.0 ** torch.randint(-6, 3, (rows, 1))).to(dtype)


def in_triton(x: torch.Tensor, dtype: torch.dtype, kind: Kind, forms: tuple[Form, ...]) -> list[Scaled]:
    among = largest(x) if kind == "tensor" else None
    return [Scaled(*one) for one in scaled_in_triton(x, dtype, kind, among, forms)]


def same_bits(one: Scaled, other: Scaled) -> bool:
    """Of numbers; what is none has no one pattern."""
    pairs = [(part.float(), wanted.float()) for part, wanted in zip(one, other, strict=True)]
    return all(torch.equal(a.nan_to_num(0.125), b.nan_to_num(0.125)) for a, b in pairs) and all(
        torch.equal(a.isnan(), b.isnan()) and a.is_contiguous() for a, b in pairs
    )


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(0, 150),
    columns=st.integers(0, 300),
    kind=st.sampled_from(KINDS),
    forms=st.sampled_from(FORMS),
    name=st.sampled_from(sorted(TYPES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scaling_is_the_cpus_to_the_bit(rows, columns, kind, forms, name, dtype) -> None:
    x = some(rows, columns, dtype)
    found = in_triton(x, TYPES[name], kind, forms)
    expected = scaled_reference(seen(x, kind), TYPES[name], kind, forms)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_spoils_what_shares_its_scale(kind: Kind, bad: float) -> None:
    x = torch.randn(140, 140)
    x[3, 3] = bad
    found = in_triton(x, torch.float8_e4m3fn, kind, BOTH)
    expected = scaled_reference(seen(x, kind), torch.float8_e4m3fn, kind, BOTH)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
    for one in found:
        numbers = one.restored(torch.float32).isfinite()
        assert not numbers[3, :128].any() and bool(numbers[139, 139]) == (kind != "tensor")


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each load and store from now on."""
    moved: list[int] = []
    for name, place_of_mask in (("load", 0), ("store", 1)):
        own = getattr(Builder, f"create_masked_{name}")

        def counted(self, places, *rest, own=own, place_of_mask=place_of_mask):
            value_bytes = places.get_element_ty().primitive_bitwidth // 8
            moved.append(int(rest[place_of_mask].data.sum()) * value_bytes)
            return own(self, places, *rest)

        monkeypatch.setattr(Builder, f"create_masked_{name}", counted)
    return moved


@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
def test_operands_are_read_and_written_as_often_as_the_planner_counts(monkeypatch, scaling: Scaling) -> None:
    monkeypatch.setattr("myriad.kernels.float8._in_triton", lambda x, kernels: True)
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(384, 256, dtype=torch.bfloat16))
    set_sink(weight, GradientSink(torch.zeros(384, 256), float8=Float8(scaling)))
    expected = float8_traffic(scaling, 2, x.numel(), 128 * 384, weight.numel(), 4)
    forward, inputs, weights = (turn.num_bytes for turn in expected)
    if scaling == "tensor":  # and the product added to its sum, by the library
        weights -= weight.numel() * (2 + 4 + 4)
    moved = count_bytes(monkeypatch)
    y = linear(x, weight)
    # what programs tell each other of the largest value is nothing beside a matrix
    assert 0 <= sum(moved) - forward < 300
    moved.clear()
    y.sum().backward()
    assert 0 <= sum(moved) - inputs - weights < 300


@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
def test_kept_forms_are_read_and_written_as_often_as_the_planner_counts(
    monkeypatch, scaling: Scaling
) -> None:
    monkeypatch.setattr("myriad.kernels.float8._in_triton", lambda x, kernels: True)
    micro_batches = torch.randn(3, 128, 256, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(384, 256, dtype=torch.bfloat16))
    sink = GradientSink(torch.zeros(384, 256), float8=Float8(scaling))
    sink.forms = KeptForms()
    set_sink(weight, sink)
    expected = float8_traffic(scaling, 2, 128 * 256, 128 * 384, weight.numel(), 4, kept_over=3)
    each = sum(turn.num_bytes for turn in expected)
    if scaling == "tensor":  # and the product added to its sum, by the library
        each -= weight.numel() * (2 + 4 + 4)
    moved = count_bytes(monkeypatch)
    for x in micro_batches:
        linear(x, weight).sum().backward()
    assert abs(sum(moved) - 3 * each) < 3 * 600


def blocks(x: torch.Tensor, dtype: torch.dtype, kind: Kind) -> Scaled:
    return scaled_reference(seen(x, kind), dtype, kind, ["rows"])[0]


@settings(max_examples=3, deadline=None)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    inner=st.integers(1, 260),
    kind=st.sampled_from(KINDS[1:]),
)
def test_products_of_blocks_are_those_of_the_numbers(rows, columns, inner, kind: Kind) -> None:
    a = blocks(torch.randn(rows, inner), torch.float8_e5m2, "lines")
    b = blocks(torch.randn(columns, inner), torch.float8_e4m3fn, kind)
    found = product_of_blocks(*a, *b, torch.float32)
    expected = a.restored(torch.float32) @ b.restored(torch.float32).t()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    total = torch.randn(rows, columns)
    before = total.clone()
    add_product_of_blocks(total, *a, *b)
    torch.testing.assert_close(total, before + found)


def test_the_doctor_s_trial_passes_and_finds_a_scale_that_is_wrong(monkeypatch) -> None:
    here, limit = torch.device("cpu"), LIMITS[torch.bfloat16]
    assert float8_disagreements(here, 16, 144)["float8"] <= limit
    monkeypatch.setattr("myriad.kernels.triton.scaling.largest", lambda x: torch.ones(1))
    assert float8_disagreements(here, 16, 144)["float8"] > limit


@pytest.mark.parametrize("counts", [[130, 0, 5], [0, 0, 1], [128, 128]])
def test_products_of_groups_are_those_of_each_group(counts: list[int], monkeypatch) -> None:
    """Experts of which one has no token, in the first micro-batch of a step and in the second."""
    groups, results = len(counts), []
    x, wave = torch.randn(sum(counts), 140), torch.randn(sum(counts), 144)
    for in_kernels in (False, True):
        monkeypatch.setattr("myriad.kernels.float8._in_triton", lambda x, kernels, on=in_kernels: on)
        monkeypatch.setattr(Float8, "multiplies", lambda self, x, on=in_kernels: on)
        weights = [torch.nn.Parameter(torch.randn(144, 140, generator=seed(n))) for n in range(groups)]
        totals = torch.zeros(groups, 144, 140)
        for weight, total in zip(weights, totals, strict=True):
            set_sink(weight, GradientSink(total, float8=Float8("blocks")))
            weight.sink.begin()
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            y = grouped_linear(leaf, RowGroups(torch.tensor(counts)), weights)
            y.backward(wave)
        results.append((y.detach(), leaf.grad, *(weight.sink.total for weight in weights)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)
