"""If these break: latent attention differs from its formula, a cached token is scored otherwise than the same
token in a whole sequence, or sizes of such a model are predicted wrongly."""

from typing import Any

import pytest
import torch

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.kernels.attention import attention_reference
from myriad.kernels.attention_choice import Scores
from myriad.kernels.norm import rms_norm_reference
from myriad.kernels.rotary import rotary_turns, turn
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.generate import Session, WholeReader
from myriad.model.gpt import GPT, build_full
from myriad.model.key_value_cache import LatentCache
from myriad.model.latent_attention import LatentAttention

SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "sequence": 24,
    "kv_lora_rank": 17, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_sequence": 8, "mscale_all_dim": 0.7},
}  # fmt: skip
QUERIES = pytest.mark.parametrize("q_lora_rank", [12, None])


def by_formula(layer: LatentAttention, config: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2's equations 9 to 19, with autograd's own gradients."""
    rank, turns = 17, rotary_turns(config.layer_rotary(0), x.shape[1], x.device)  # type: ignore[arg-type]
    rotation = torch.view_as_real(turns)

    def turned(values: torch.Tensor) -> torch.Tensor:
        even, odd = values[..., 0::2], values[..., 1::2]
        cosine, sine = rotation[:, None, :, 0], rotation[:, None, :, 1]
        return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)

    down = x @ layer.down.weight.T
    if layer.query is not None:
        q, down = x @ layer.query.weight.T, down
    else:
        assert layer.q_norm is not None and layer.q_up is not None
        normed = rms_norm_reference(down[..., :12], layer.q_norm.weight, 1e-6)
        q, down = normed @ layer.q_up.weight.T, down[..., 12:]
    latent = rms_norm_reference(down[..., :rank], layer.kv_norm.weight, 1e-6)
    q, kv = (y.unflatten(-1, (4, -1)) for y in (q, latent @ layer.kv_up.weight.T))
    shared = turned(down[..., rank:].unsqueeze(2)).expand(-1, -1, 4, -1)
    queries = torch.cat([q[..., :7], turned(q[..., 7:])], -1)
    keys = torch.cat([kv[..., :7], shared], -1)
    scale = 11**-0.5 * (0.1 * 0.7 * torch.tensor(4.0).log().item() + 1) ** 2
    mixed = attention_reference(queries, keys, kv[..., 7:], how=Scores(scale))
    return mixed.flatten(2) @ layer.output.weight.T


@QUERIES
@pytest.mark.parametrize("in_order", [False, True])
def test_output_and_gradients_are_those_of_the_formula(q_lora_rank: int | None, in_order: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**SIZES, q_lora_rank=q_lora_rank)
    layer = LatentAttention(config, 0, Boundary())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 24, 32, requires_grad=True)
    given = x.transpose(0, 1).contiguous().transpose(0, 1) if in_order else x
    weight = torch.randn(2, 24, 32)
    inputs = [x, *layer.parameters()]
    out, expected = layer.out(layer.mix(layer.project(given))), by_formula(layer, config, x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    pairs = zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (out, expected)), strict=True)
    for found, reference in pairs:
        torch.testing.assert_close(found, reference, atol=2e-4, rtol=1e-4)


@QUERIES
def test_a_cached_token_has_the_logits_of_a_whole_sequence(q_lora_rank: int | None) -> None:
    config = ModelConfig(**SIZES, q_lora_rank=q_lora_rank, initial_deviation=0.2)
    layers, tokens = build_full(config, 1), torch.randint(64, (1, 20))
    with torch.no_grad():
        x = tokens
        for layer in layers[:-1]:
            x = layer(x, Context())
        whole = layers[-1].logits(x)[0]
    session = Session(WholeReader(layers), config.sequence)
    logits = [session.add([tokens[0, :5].tolist()])[0]]
    logits += [session.read([[int(token)]])[0] for token in tokens[0, 5:]]
    torch.testing.assert_close(torch.stack(logits), whole[4:], atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.stack(logits).argmax(-1), whole[4:].argmax(-1))
    for cache in session.caches:
        assert isinstance(cache, LatentCache) and cache.num_bytes == 20 * (17 + 4) * 4


@QUERIES
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_are_as_many_as_predicted(q_lora_rank: int | None, tp: int) -> None:
    from myriad.planner.memory.layer_memory import layer_elements

    config, boundary = ModelConfig(**SIZES, q_lora_rank=q_lora_rank, tied=False), Boundary()
    boundary.size = tp
    with torch.device("meta"):
        layers = [GPT(config, 1).build(index, boundary) for index in range(4)]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert sizes[1] == layer_elements(config, "block", tp)
    if tp == 1:
        assert sum(sizes) == config.num_parameters() and sizes[1] == config.block_parameters


def test_flops_of_deepseek_v3s_attention() -> None:
    """187,105,280 elements in the matrices of a block's attention; a pair costs 192 + 128 for each of 128
    heads."""
    config = ModelConfig(
        layers=1, hidden=7168, heads=128, sequence=4096, q_lora_rank=1536, kv_lora_rank=512,
        ffn_hidden=18432, activation="swiglu", vocabulary=129280,
    )  # fmt: skip
    elements = 187_105_280
    expected = 6 * (elements + 3 * 7168 * 18432 + 4096 * 128 * (192 + 128))
    assert config.layer_flops_per_token()[1] == expected


def test_rotation_without_a_gradient_keeps_the_type() -> None:
    turns = torch.polar(torch.ones(3, 2), torch.ones(3, 2))
    assert turn(torch.ones(1, 3, 1, 4, dtype=torch.bfloat16), turns).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["model.q_lora_rank=8"], "model.q_lora_rank = 8: only with model.kv_lora_rank"),
        (["model.v_head_dim=8"], "model.v_head_dim = 8"),
        (["model.kv_lora_rank=8", "model.kv_heads=2"], "model.kv_heads = 2"),
        (["model.kv_lora_rank=8", "model.block=parallel"], "serial with model.kv_lora_rank"),
        (["model.kv_lora_rank=8", "model.window=8"], "off with model.kv_lora_rank"),
        (["model.kv_lora_rank=8", "model.qk_rope_head_dim=3"], "an even number"),
        (["model.kv_lora_rank=8", "model.v_head_dim=300"], "at most model.qk_nope_head_dim"),
        (
            [
                "model.rotary_scaling.kind=yarn",
                "model.rotary_scaling.original_sequence=32",
                "model.rotary_scaling.mscale_all_dim=1.0",
            ],
            "only with model.kv_lora_rank",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: list[str], error: str) -> None:
    with pytest.raises(BadInputError) as refused:
        load_job("tiny", keys)
    assert error in str(refused.value)
