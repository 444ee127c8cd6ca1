"""If these break: a fused operator does not compute what its plain reference does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from myriad.kernels.activation import ACTIVATIONS
from myriad.kernels.attention import attention, attention_reference
from myriad.kernels.attention_blocks import Heads, runs_in_blocks
from myriad.kernels.attention_choice import Scores
from myriad.kernels.cross_entropy import chunk_tokens, linear_cross_entropy, linear_cross_entropy_reference
from myriad.kernels.embedding import add_rows_sorted, embedding, embedding_reference
from myriad.kernels.float8 import Float8
from myriad.kernels.gradient import GradientSink, accumulate_product, apply_deferred, set_sink
from myriad.kernels.linear import linear
from myriad.kernels.norm import LayerNorm, RMSNorm, rms_norm_reference
from myriad.kernels.random import dropout, hashed_uniform, key_of, seeded_normal
from myriad.kernels.rotary import Rotary, rotary_reference, rotary_turns, turned
from myriad.model.boundary import Arrived, Boundary


def gradients(function, *tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    wave = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()
    return y.detach(), *torch.autograd.grad(y, leaves, wave)


def assert_same(function, reference, *tensors, rtol=1e-4, atol=1e-5):
    for a, b in zip(gradients(function, *tensors), gradients(reference, *tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def reference(fused, heads, window, base, how=Scores(), sinks=None):
    parts = fused.unflatten(-1, (-1, heads.width)).split([heads[0], heads[1], heads[1]], 2)
    q, k, v = parts
    if base:
        q, k = rotary_reference(q, base), rotary_reference(k, base)
    return attention_reference(q, k, v, window, how, sinks).flatten(2)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 16, 24, 30, 64, 128, 192, 200]),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([2, 8]),
    st.sampled_from([None, 1, 2, 4, 5, 8, 12, 40, 64, 65, 100]),
    st.sampled_from([None, 100.0]),
    st.booleans(),
    st.sampled_from([Scores(), Scores(scale=0.7), Scores(softcap=1.5)]),
    st.booleans(),
)
def test_attention(batch, sequence, num_heads, width, window, base, in_blocks, how, has_sinks):
    torch.manual_seed(0)
    heads = Heads(*num_heads, width)
    sinks = [torch.randn(heads.num_heads)] if has_sinks else []
    fused = torch.randn(batch, sequence, (heads[0] + 2 * heads[1]) * width)
    turns = rotary_turns(Rotary(base, width), sequence, fused.device) if base else None
    with pytest.MonkeyPatch.context() as patch:
        if not in_blocks:
            patch.setattr("myriad.kernels.attention.runs_in_blocks", lambda *_, **options: False)
        assert_same(
            lambda fused, *sinks: attention(fused, heads, window, turns, "auto", how, *sinks),
            lambda fused, *sinks: reference(fused, heads, window, base, how, *sinks),
            fused,
            *sinks,
        )


@pytest.mark.parametrize("how, has_sinks", [(Scores(softcap=50.0), False), (Scores(), True)])
def test_scores_of_bfloat16_values_are_not_rounded_to_bfloat16(how, has_sinks):
    torch.manual_seed(0)
    heads, sinks = Heads(4, 2, 16), torch.zeros(4) if has_sinks else None
    fused = torch.randn(2, 32, 8 * 16).mul(6).bfloat16()
    found = attention(fused, heads, how=how, sinks=sinks).double()
    expected = reference(fused.double(), heads, None, None, how, sinks)
    assert (found - expected).norm() < 0.005 * expected.norm()


def test_blocks_are_for_short_spans_of_float32_on_cpu():
    assert runs_in_blocks(torch.empty(1, 256, 3), None)
    assert runs_in_blocks(torch.empty(1, 8192, 3), 256)
    assert not runs_in_blocks(torch.empty(1, 8192, 3), None)
    assert runs_in_blocks(torch.empty(1, 8192, 3), None, capped=True)
    assert not runs_in_blocks(torch.empty(1, 200, 3), None)
    assert not runs_in_blocks(torch.empty(1, 256, 3, dtype=torch.bfloat16), None)
    assert not runs_in_blocks(torch.empty(1, 256, 3, device="meta"), None)


@pytest.mark.parametrize("sequence", [32, 128])
def test_attention_sees_exactly_its_window(sequence):
    q, k = torch.randn(2, 1, sequence, 1, sequence)
    v = torch.eye(sequence)[None, :, None, :]  # the output is the attention matrix
    fused = torch.cat([q, k, v], 2).flatten(2)
    seen = attention(fused, Heads(1, 1, sequence), 4)[0] > 0
    assert torch.equal(seen, torch.ones(sequence, sequence).tril().triu(-3).bool())


def test_linear_with_a_bias_and_any_leading_shape():
    x, weight, bias = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(7)
    assert_same(linear, F.linear, x, weight, bias)


def test_a_sink_adds_up_over_micro_batches_and_autograd_sees_no_gradient():
    weight = torch.randn(7, 5, requires_grad=True)
    sink = GradientSink(torch.ones(7, 5))
    set_sink(weight, sink)
    x = torch.randn(2, 4, 5)
    for part in x:
        linear(part, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(sink.total, 1 + x.sum((0, 1)).expand(7, 5))


def writers():
    """(name, shape of the weight, its type, what writes a gradient of seed ``k`` to its sink)."""

    def product(weight, k, dtype=torch.float32):
        x = torch.randn(32, weight.shape[1], generator=torch.Generator().manual_seed(k)).to(dtype)
        (linear(x, weight).float() ** 2).sum().backward()

    def loss(weight, k):
        generator = torch.Generator().manual_seed(k)
        x, targets = torch.randn(9, weight.shape[1], generator=generator), torch.arange(9) * k % 8
        (linear_cross_entropy(x, weight, targets, Boundary(), 8) * 0.3).backward()

    def rows(weight, k):
        (embedding(torch.arange(6)[None] * k % 16, weight, 0, len(weight)) ** 2).sum().backward()

    def dense(weight, k):
        weight.sink.add(torch.randn(weight.shape, generator=torch.Generator().manual_seed(k)))

    def scaled(weight, k):
        weight.sink.add(torch.randn(weight.shape, generator=torch.Generator().manual_seed(k)), 0.5)

    def partial_sums(weight, k):
        weight.sink.add_rows(torch.randn(3, *weight.shape, generator=torch.Generator().manual_seed(k)))

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield f"product {dtype}", dtype, None, lambda weight, k, dtype=dtype: product(weight, k, dtype)
    for scaling in ("tensor", "blocks"):
        how = Float8(scaling)
        yield f"float8 {scaling}", torch.bfloat16, how, lambda w, k: product(w, k, torch.bfloat16)
    for function in (loss, rows, dense, scaled, partial_sums):
        yield function.__name__, torch.float32, None, function


@pytest.mark.parametrize(("name", "dtype", "float8", "write"), [*writers()], ids=lambda one: str(one)[:20])
def test_a_first_gradient_replaces_whatever_the_memory_has(name, dtype, float8, write):
    found = []
    for begins in (True, False):
        torch.manual_seed(0)
        weight = torch.randn(16, 16).to(dtype).requires_grad_()
        sink = GradientSink(torch.full((16, 16), float("nan") if begins else 0.0), float8=float8)
        set_sink(weight, sink)
        if begins:
            sink.begin()
        write(weight, 3)
        first = sink.total.clone()
        write(weight, 5)
        assert weight.grad is None
        found.append((first, sink.total))
    assert all(map(torch.equal, *found))
    assert not torch.equal(*found[0]), "the second is added"


def test_a_sum_without_gradients_is_zero():
    sinks = [GradientSink(torch.full((3, 4), float("nan"))) for _ in range(2)]
    for sink in sinks:
        sink.begin()
    sinks[0].settle()
    assert not sinks[0].total.any()
    assert not sinks[1].total.any()


def test_deferred_products_give_the_bits_of_immediate_ones():
    weight, x = torch.randn(7, 5, requires_grad=True), torch.randn(3, 4, 5)

    def total(*, defer):
        sink = GradientSink(torch.zeros(7, 5))
        set_sink(weight, sink)
        lists = []
        for part in x:
            sink.deferred = [] if defer else None
            (linear(part, weight) ** 2).sum().backward()
            lists.append(sink.deferred or [])
            assert not defer or sink.total.abs().sum() == 0
        for products in lists:
            apply_deferred(products)
        return sink.total

    assert torch.equal(total(defer=True), total(defer=False))


def test_bfloat16_gradients_are_summed_in_float32():
    weight = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    sink = GradientSink(torch.full((8, 8), 1024.0))
    set_sink(weight, sink)
    linear(torch.full((1, 8), 0.125, dtype=torch.bfloat16), weight).sum().backward()
    assert torch.equal(sink.total, torch.full((8, 8), 1024.125))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20),
    st.sampled_from([(8, 8), (8, 5), (16, 9)]),
    st.sampled_from([1, 3, 7, 64]),
    st.sampled_from([{}, {"softcap": 1.5}, {"z_loss": 0.1}, {"softcap": 2.0, "z_loss": 0.3}]),
)
def test_cross_entropy(num_tokens, rows_and_vocabulary, chunk, options):
    rows, vocabulary = rows_and_vocabulary
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 6), torch.randn(rows, 6)
    targets = torch.randint(vocabulary, (num_tokens,))
    assert_same(
        lambda x, weight: linear_cross_entropy(x, weight, targets, Boundary(), vocabulary, chunk, **options),
        lambda x, weight: linear_cross_entropy_reference(x, weight, targets, vocabulary, **options),
        x,
        weight,
    )


def test_cross_entropy_to_a_sink_is_scaled_by_what_the_loss_is_scaled_by():
    x, weight = torch.randn(9, 6), torch.randn(8, 6, requires_grad=True)
    targets = torch.randint(8, (9,))
    (linear_cross_entropy(x, weight, targets, Boundary(), 8) * 0.25).backward()
    sink = GradientSink(torch.zeros(8, 6))
    expected, weight.grad = weight.grad, None
    set_sink(weight, sink)
    (linear_cross_entropy(x, weight, targets, Boundary(), 8) * 0.25).backward()
    assert weight.grad is None
    torch.testing.assert_close(sink.total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_product_of_a_sum_does_not_read_what_was_there(dtype):
    grads, x = torch.randn(700, 3, dtype=dtype), torch.randn(700, 4, dtype=dtype)
    expected, total = torch.zeros(3, 4), torch.full((3, 4), torch.nan)
    accumulate_product(expected, grads, x)
    accumulate_product(total, grads, x, first=True)
    assert torch.equal(total, expected)


@pytest.mark.parametrize(
    ("rows", "tokens", "ranks", "expected"),
    [
        (128_256, 8192, 1, 2048),
        (128_256 // 8, 8192, 8, 4096),
        (50_304, 16_384, 1, 5120),
        (10**6, 8192, 1, 512),
    ],
)
def test_chunks_of_a_gpu_are_large_and_fill_the_tiles_of_products(rows, tokens, ranks, expected):
    assert chunk_tokens(rows, tokens, ranks, on_gpu=True) == expected


def test_cross_entropy_of_very_large_and_very_unlikely_scores_is_finite():
    x = torch.full((4, 6), 100.0, requires_grad=True)
    weight = torch.cat([torch.full((4, 6), 100.0), torch.full((4, 6), -100.0)])
    loss = linear_cross_entropy(x, weight, torch.full((4,), 7), Boundary(), 8)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()


class Stacker(Boundary):
    """Runs the ranks of a vocabulary one after the other, twice: then it is known what the others tell."""

    def __init__(self, size):
        self.size, self.place, self.known = size, 0, {}

    def start_stack(self, x):
        self.place += 1
        self.known[self.rank, self.place] = x.clone()
        return Arrived(torch.stack([self.known.get((rank, self.place), x) for rank in range(self.size)]))

    def run(self, function):
        for _ in range(2):
            results = []
            for rank in range(self.size):
                self.rank, self.place = rank, 0
                results.append(function(self))
        return results


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "z_loss": 0.2}], ids=str)
@pytest.mark.parametrize("vocabulary", [16, 11, 3])
def test_cross_entropy_over_a_vocabulary_on_several_ranks(vocabulary, options, skips):
    x, weight = torch.randn(10, 6), torch.randn(16, 6)
    targets = torch.randint(vocabulary, (10,))
    counted = torch.arange(10) % 3 != 1 if skips else torch.ones(10, dtype=torch.bool)

    def plain(x, weight):
        return linear_cross_entropy_reference(x[counted], weight, targets[counted], vocabulary, **options)

    expected = gradients(plain, x, weight)
    targets = torch.where(counted, targets, ~targets)
    options = options | {"skips": skips}

    def on_rank(peers):
        rows = weight.chunk(4)[peers.rank]
        return gradients(
            lambda x, rows: linear_cross_entropy(x, rows, targets, peers, vocabulary, 4, **options), x, rows
        )

    losses, grads_x, grads_rows = zip(*Stacker(4).run(on_rank), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected[0])
    torch.testing.assert_close(sum(grads_x), expected[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(grads_rows), expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first_row", [0, 4, 8])
def test_embedding_of_a_part_of_the_vocabulary(first_row):
    tokens = torch.randint(12, (3, 7))
    weight = torch.randn(4, 5)
    assert_same(
        lambda weight: embedding(tokens, weight, first_row, 12),
        lambda weight: embedding_reference(tokens, weight, first_row),
        weight,
    )
    sink = GradientSink(torch.zeros(4, 5))
    expected = gradients(lambda weight: embedding(tokens, weight, first_row, 12), weight)[1]
    leaf = weight.clone().requires_grad_()
    set_sink(leaf, sink)
    y = embedding(tokens, leaf, first_row, 12)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin())
    torch.testing.assert_close(sink.total, expected)


@pytest.mark.parametrize("present", [1.0, 0.25])
def test_rows_that_a_gpu_adds_sorted_are_those_that_a_cpu_adds(present):
    rows, gradients = torch.randint(4, (40,)), torch.randn(40, 5)
    absent = torch.rand(40) >= present
    gradients[absent] = 0.0
    expected = torch.randn(4, 5)
    total = expected.clone()
    expected.index_add_(0, rows, gradients)
    add_rows_sorted(total, rows, gradients, absent if present < 1 else absent[:0])
    torch.testing.assert_close(total, expected)


def rotated(x, base, first_position=0):
    return turned(x, rotary_turns(Rotary(base, x.shape[3]), x.shape[1], x.device, first_position))


def test_rotary():
    x = torch.randn(2, 9, 3, 8)
    assert_same(lambda x: rotated(x, 100.0), lambda x: rotary_reference(x, 100.0), x)
    torch.testing.assert_close(rotated(x, 100.0, 5), rotary_reference(x, 100.0, 5), rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8)

    def score(at_q, at_k):
        return (rotated(q, 100.0, at_q) * rotated(k, 100.0, at_k)).sum().item()

    assert score(3, 1) == pytest.approx(score(60, 58), abs=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norms(kind):
    hidden, epsilon = 12, 1e-3
    module = RMSNorm(hidden, epsilon) if kind == "rms" else LayerNorm(hidden, epsilon, bias="bias" in kind)
    weight, bias = torch.randn(hidden), torch.randn(hidden)
    x = torch.randn(3, 5, hidden) * 2 + 0.5

    def fused(x, *parameters):
        names = [name for name, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    if kind == "rms":
        assert_same(fused, lambda x, weight: rms_norm_reference(x, weight, epsilon), x, weight)
    elif kind == "layer":
        assert_same(fused, lambda x, w: F.layer_norm(x, (hidden,), w, None, epsilon), x, weight)
    else:
        assert_same(fused, lambda x, w, b: F.layer_norm(x, (hidden,), w, b, epsilon), x, weight, bias)


def test_activations():
    x = torch.randn(3, 4, 10) * 3
    references = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "swiglu": lambda x: x[..., :5] * torch.sigmoid(x[..., :5]) * x[..., 5:],
        "clamped_swiglu": lambda x: _silu_like(x[..., :5].clamp(max=7)) * (x[..., 5:].clamp(-7, 7) + 1),
        "geglu": lambda x: F.gelu(x[..., :5]) * x[..., 5:],
        "geglu_tanh": lambda x: F.gelu(x[..., :5], approximate="tanh") * x[..., 5:],
        "relu2": lambda x: x.clamp(min=0) ** 2,
    }
    assert references.keys() == ACTIVATIONS.keys()
    for name, reference in references.items():
        assert_same(ACTIVATIONS[name], reference, x)
    beyond = torch.tensor([[8.0, 6.0, -9.0, 1.0, 2.0, 9.0, -8.0, 3.0, 6.5, -6.5]])  # bounds are 7
    assert_same(ACTIVATIONS["clamped_swiglu"], references["clamped_swiglu"], beyond)


def _silu_like(gate: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(1.702 * gate)


def test_dropout_keeps_the_mean_and_depends_on_sample_and_position_alone():
    x = torch.ones(4, 64, 50)
    samples = torch.tensor([7, 8, 1000, 10**12])
    at = torch.arange(64)
    whole = dropout(x, 0.25, key_of(1, "a"), samples, at)
    assert whole.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert whole.mean().item() == pytest.approx(1.0, abs=0.03)
    part = dropout(x[1:3, 20:30], 0.25, key_of(1, "a"), samples[1:3], at[20:30])
    assert torch.equal(part, whole[1:3, 20:30])
    for key in (key_of(2, "a"), key_of(1, "b")):
        other = dropout(x, 0.25, key, samples, at)
        assert 0.5 < (other == whole).float().mean().item() < 0.75  # 0.625 when independent


def test_hashed_numbers_are_uniform_and_normal_and_repeatable():
    indices = (torch.arange(300)[:, None], torch.arange(300))
    uniform = hashed_uniform(3, indices)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert (uniform.histc(10, 0, 1) / uniform.numel() - 0.1).abs().max() < 0.005
    rows = uniform - uniform.mean()
    assert (rows[1:] * rows[:-1]).mean().abs() < 1e-3
    assert torch.equal(hashed_uniform(3, (indices[0][5:6], indices[1])), uniform[5:6])
    values = seeded_normal(7, (200, 300), 0.5)
    assert values.std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.equal(values, seeded_normal(7, (200, 300), 0.5))
