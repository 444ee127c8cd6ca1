"""If these break: a model has other parameters than its description says, or its parts do not add up to the
whole."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context, Shard, shard_of
from myriad.model.gpt import GPT, build_full

TINY = ModelConfig(layers=2, hidden=32, heads=4, vocabulary=100, vocabulary_multiple=8, sequence=32)

configs = st.builds(
    lambda **keys: TINY.model_copy(update=keys | ({"norm": "rms"} if keys["norm_zero_centered"] else {})),
    block=st.sampled_from(["serial", "parallel"]),
    window=st.sampled_from([None, 1, 5, 8, 16, 32]),
    window_pattern=st.sampled_from([(True,), (True, False)]),
    kv_heads=st.sampled_from([None, 1, 2]),
    head_dim=st.sampled_from([None, 6]),
    ffn_hidden=st.sampled_from([None, 24]),
    position=st.sampled_from(["rotary", "learned", "none"]),
    norm=st.sampled_from(["rms", "layer"]),
    activation=st.sampled_from(["gelu", "swiglu", "geglu", "relu2"]),
    bias=st.booleans(),
    tied=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    parallel_norms=st.sampled_from([1, 2]),
    qk_norm=st.sampled_from(["none", "head", "heads", "all"]),
    qk_norm_kind=st.sampled_from(["rms", "layer"]),
    attention_softcap=st.sampled_from([None, 5.0]),
    attention_sinks=st.booleans(),
    attention_bias=st.sampled_from(["default", "qkv", "all"]),
    rotary_fraction=st.sampled_from([1.0, 0.67]),
    rotary_pattern=st.sampled_from([(True,), (True, False)]),
    norm_placement=st.sampled_from(["before", "after", "both"]),
    norm_zero_centered=st.booleans(),
    norm_bias=st.booleans(),
    residual_scale=st.sampled_from([1.0, 0.5]),
    logit_softcap=st.sampled_from([None, 30.0]),
)


def batch(config, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (size, config.sequence + 1), generator=generator)
    return tokens[:, :-1], Context(targets=tokens[:, 1:], samples=torch.arange(size), seed=5)


def run(layers, tokens, context):
    x = tokens
    for layer in layers:
        x = layer(x, context)
    return x


@settings(max_examples=25, deadline=None)
@given(configs)
def test_every_combination_trains_and_has_the_parameters_it_claims(config):
    layers = build_full(config, 1)
    padding = (config.padded_vocabulary() - config.vocabulary) * config.hidden * (1 if config.tied else 2)
    assert sum(parameter.numel() for parameter in layers.parameters()) == config.num_parameters() + padding
    tokens, context = batch(config)
    loss = run(layers, tokens, context) / tokens.numel()
    assert abs(loss.item() - torch.log(torch.tensor(config.vocabulary)).item()) < 0.2
    loss.backward()
    unseen = [name for name, parameter in layers.named_parameters() if not parameter.grad.abs().sum() > 0]
    reach_queries_alone = ("qkv", "norm1", "q_norm", "k_norm")
    assert all(any(each in name for each in reach_queries_alone) for name in unseen if config.window == 1)
    assert config.window == 1 or not unseen


@settings(max_examples=20, deadline=None)
@given(configs)
def test_gradients_through_sinks_are_those_of_autograd(config):
    tokens, context = batch(config)
    plain, sunk = build_full(config, 1), build_full(config, 1)
    (run(plain, tokens, context) * 0.01).backward()
    deferred = []
    for parameter in sunk.parameters():
        set_sink(parameter, GradientSink(torch.zeros_like(parameter), deferred))
    (run(sunk, tokens, context) * 0.01).backward()
    apply_deferred(deferred)
    assert deferred == []
    for (name, a), b in zip(plain.named_parameters(), sunk.parameters(), strict=True):
        gradient = b.sink.total if b.grad is None else b.sink.total + b.grad
        torch.testing.assert_close(gradient, a.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_model_of_half_a_trillion_parameters_needs_no_memory_to_be_described():
    config = ModelConfig(layers=105, hidden=20480, heads=160, vocabulary=64000, sequence=2048)
    definition = GPT(config, 1)
    with torch.device("meta"):
        layers = [definition.build(i, Boundary()) for i in range(len(definition.names))]
    shared = layers[-1].output.weight.numel()
    assert sum(p.numel() for layer in layers for p in layer.parameters()) - shared == config.num_parameters()


def test_a_layer_runs_on_the_meta_device_forward_and_backward():
    definition = GPT(TINY, 1)
    with torch.device("meta"):
        layers = [definition.build(i, Boundary()) for i in range(len(definition.names))]
    tokens = torch.empty(2, 32, dtype=torch.int64, device="meta")
    loss = run(layers, tokens, Context(targets=tokens))
    loss.backward()
    assert loss.is_meta
    assert all(p.grad is not None and p.grad.is_meta for layer in layers for p in layer.parameters())


@settings(max_examples=10, deadline=None)
@given(configs)
def test_stated_shapes_are_those_of_the_layers(config):
    definition = GPT(config, 1)
    with torch.device("meta"):
        layers = [definition.build(i, Boundary()) for i in range(len(definition.names))]
    tokens = x = torch.empty(3, config.sequence, dtype=torch.int64, device="meta")
    for index, layer in enumerate(layers):
        x = layer.eval()(x, Context(targets=tokens))
        assert definition.output_shape(index, tokens.shape, Boundary()) == x.shape


class Peer(Boundary):
    """The shapes of one of several ranks, without a group."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@settings(max_examples=25, deadline=None)
@given(configs, st.sampled_from([1, 2, 4]))
def test_the_cut_of_the_whole_parameter_fits_the_layer_of_each_rank(config, tp):
    if tp not in config.head_degrees:
        tp = 1
    definition = GPT(config, 1)
    for index, prefix in enumerate(definition.names):
        whole = definition.initial(index)
        for rank in range(tp):
            layer = definition.build(index, Peer(rank, tp))
            for name, parameter in layer.named_parameters():
                shard = shard_of(definition, f"{prefix}.{name}")
                part = whole[name] if shard is None else shard.take(whole[name], rank, tp)
                assert part.shape == parameter.shape, name


@pytest.mark.parametrize(
    ("block", "activation", "kv_heads"),
    [("serial", "gelu", 4), ("parallel", "swiglu", 2), ("serial", "gelu", 1)],
)
def test_partial_sums_of_two_ranks_are_the_block_of_one(block, activation, kv_heads):
    config = TINY.model_copy(
        update={"block": block, "activation": activation, "kv_heads": kv_heads, "bias": True, "norm": "layer"}
    )
    definition = GPT(config, 1)
    x = torch.randn(2, 32, 32)
    whole = definition.build(1, Boundary())
    values = {name: torch.randn_like(value) * 0.1 for name, value in definition.initial(1).items()}
    whole.load_state_dict(values)
    parts = []
    for rank in range(2):
        part = definition.build(1, Peer(rank, 2))
        cut = {}
        for name, value in values.items():
            shard = shard_of(definition, f"blocks.0.{name}")
            cut[name] = value if shard is None else shard.take(value, rank, 2)
        part.load_state_dict(cut)
        parts.append(part)
    for branch in (lambda block: block.mlp(x), lambda block: attend(block.attention, x)):
        total = sum(branch(part) for part in parts)
        torch.testing.assert_close(total, branch(whole), rtol=1e-4, atol=1e-5)


def attend(attention, x):
    return attention.out(attention.mix(attention.qkv(x)))


def test_initial_values_depend_on_the_name_alone():
    first, again, other = GPT(TINY, 1), GPT(TINY, 1), GPT(TINY, 2)
    for index in range(len(first.names)):
        a, b, c = first.initial(index), again.initial(index), other.initial(index)
        for name in a:
            assert torch.equal(a[name], b[name])
            assert a[name].dim() == 1 or not torch.equal(a[name], c[name])
    assert torch.equal(first.initial(3)["output.weight"], first.initial(0)["tokens.weight"])
    assert not torch.equal(first.initial(1)["mlp.up.weight"], first.initial(2)["mlp.up.weight"])


def test_projections_into_the_residual_stream_start_smaller():
    values = GPT(TINY.model_copy(update={"hidden": 128}), 1).initial(1)
    assert values["mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert values["attention.output.weight"].std().item() == pytest.approx(0.01, rel=0.05)


def test_dropout_does_not_depend_on_how_the_batch_is_cut():
    config = TINY.model_copy(update={"dropout": 0.3})
    layers = build_full(config, 1)
    tokens, context = batch(config, 4)
    whole = run(layers, tokens, context)
    cuts = [[0, 1, 2], [3]]
    parts = [
        run(layers, tokens[cut], Context(targets=context.targets[cut], samples=torch.tensor(cut), seed=5))
        for cut in cuts
    ]
    torch.testing.assert_close(sum(parts), whole)
    layers.eval()
    assert run(layers, tokens, context) != whole


def test_bfloat16_parameters_compute_in_bfloat16_with_a_float32_loss():
    for norm, activation in itertools.product(["rms", "layer"], ["gelu", "swiglu"]):
        config = TINY.model_copy(update={"norm": norm, "activation": activation})
        layers = build_full(config, 1)
        tokens, context = batch(config)
        exact = run(layers, tokens, context)
        layers.to(torch.bfloat16)
        assert layers[1](layers[0](tokens, context), context).dtype == torch.bfloat16
        loss = run(layers, tokens, context)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)


def test_shard_of_fused_matrices_gives_each_rank_its_heads():
    rows = torch.arange(8)[:, None]
    assert Shard(0, (4, 2, 2)).take(rows, 1, 2).flatten().tolist() == [2, 3, 5, 7]
