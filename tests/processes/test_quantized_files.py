"""If these break: official weights in MXFP4 or FP8 are read as other values than transformers reads, or a
damaged file of them is not refused before its values are read."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import pytest
import torch
import transformers
from hugging_face_case import our_logits, tokens_of
from safetensors.torch import load_file, save_file

from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights
from myriad.errors import BadInputError

SMALL = {
    "vocab_size": 90, "bos_token_id": None, "eos_token_id": None, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 24, "pad_token_id": None,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Tensors = dict[str, torch.Tensor]


def integration(module: str) -> Any:
    """A module of transformers. Each takes a second, in every process that collects these tests."""
    return import_module(f"transformers.integrations.{module}")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_model(config: Any) -> Any:
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def written(model: Any, folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> Path:
    """Write a model's config, with these tensors."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def state_of(model: Any, folder: Path) -> Tensors:
    """Tensors under the names that they have in files."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def gpt_oss(tmp_path: Path) -> tuple[Any, Tensors]:
    """Return a model whose experts are exact in MXFP4, and the tensors of its file."""
    config = transformers.GptOssConfig(
        **SMALL, num_local_experts=3, num_experts_per_tok=2, sliding_window=5, attn_implementation="eager"
    )
    model = random_model(config)
    generator = torch.Generator().manual_seed(1)
    tensors = state_of(model, tmp_path / "plain")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            values = integration("mxfp4").convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).copy_(values)
    return model, tensors


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    model, tensors = gpt_oss(tmp_path)
    weights = HuggingFaceWeights(written(model, tmp_path / "mxfp4", tensors, MXFP4))
    state_of(model, tmp_path / "exact")
    exact = HuggingFaceWeights(tmp_path / "exact")
    assert weights.model == exact.model and weights.shapes == exact.shapes
    for name, shape in weights.shapes.items():
        whole = exact.read(name)
        assert torch.equal(weights.read(name).float(), whole), name
        if len(shape) == 2:  # parts of a shard, which no group of 32 values divides
            boxes = [(slice(0, shape[0]), slice(3, 37)), (slice(1, 2), slice(31, shape[1]))]
            for part, box in zip(weights.read_parts(name, boxes), boxes, strict=True):
                assert torch.equal(part.float(), whole[box]), name
    assert weights.model is not None
    tokens = tokens_of(weights.model)
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(weights, tokens), expected, atol=3e-5, rtol=1e-5)


def test_every_code_and_exponent_of_mxfp4_has_transformers_value(tmp_path: Path) -> None:
    model, tensors = gpt_oss(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    blocks.flatten()[:256] = torch.arange(256).to(torch.uint8)
    scales.flatten()[:256] = torch.arange(256).to(torch.uint8)
    weights = HuggingFaceWeights(written(model, tmp_path / "mxfp4", tensors, MXFP4))
    expected = integration("mxfp4").convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        found = weights.read(f"blocks.0.mlp.experts.{expert}.down.weight")
        torch.testing.assert_close(found, expected[expert].T, rtol=0, atol=0, equal_nan=True)


def deepseek(tmp_path: Path) -> tuple[Any, Tensors]:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    config = transformers.DeepseekV3Config(
        **SMALL | sizes | {"num_key_value_heads": 4, "head_dim": 8}, v_head_dim=16, first_k_dense_replace=1,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=40, n_group=2,
        topk_group=1,
    )  # fmt: skip
    model = random_model(config)
    return model, state_of(model, tmp_path / "plain")


def quantized(tensors: Tensors, block: tuple[int, int]) -> Tensors:
    """Return the tensors of a file in FP8: matrices of attention and MLPs, as DeepSeek-V3 has them."""
    found: Tensors = {}
    for name, values in tensors.items():
        if values.ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            found[name] = values
            continue
        rows, columns = (-(-size // own) for size, own in zip(values.shape, block, strict=True))
        scales = torch.empty(rows, columns)
        stored = torch.empty_like(values, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                box = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], None)
                box = box[0], slice(box[1].start, box[1].start + block[1])
                scales[row, column] = values[box].abs().max() / 448
                stored[box] = (values[box] / scales[row, column]).to(torch.float8_e4m3fn)
        found |= {name: stored, f"{name}_scale_inv": scales}
    return found


@pytest.mark.parametrize("block", [(128, 128), (16, 24)])
def test_matrices_in_fp8_are_read_as_transformers_reads_them(block: tuple[int, int], tmp_path: Path) -> None:
    """Blocks that are larger than a matrix, and blocks that do not divide it."""
    model, tensors = deepseek(tmp_path)
    stored = quantized(tensors, block)
    keys = FP8 | {"weight_block_size": [*block]}
    weights = HuggingFaceWeights(written(model, tmp_path / "fp8", stored, keys))
    values = {
        name: integration("finegrained_fp8")._dequantize_fp8_weight(
            one, stored[f"{name}_scale_inv"], [*block], torch.float32
        )
        if f"{name}_scale_inv" in stored
        else one
        for name, one in stored.items()
        if not name.endswith("_scale_inv")
    }
    assert any(not torch.equal(values[name], tensors[name]) for name in tensors)
    save_file(values, tmp_path / "plain" / "model.safetensors")
    exact = HuggingFaceWeights(tmp_path / "plain")
    for name, shape in weights.shapes.items():
        whole = exact.read(name)
        assert torch.equal(weights.read(name).float(), whole), name
        if len(shape) == 2:
            boxes = [(slice(3, shape[0]), slice(0, shape[1])), (slice(1, 2), slice(7, shape[1] - 1))]
            for part, box in zip(weights.read_parts(name, boxes), boxes, strict=True):
                assert torch.equal(part.float(), whole[box]), name
    assert weights.model is not None
    tokens = tokens_of(weights.model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        expected, other = theirs(tokens).logits, model(tokens).logits
    torch.testing.assert_close(our_logits(weights, tokens), expected, atol=3e-5, rtol=1e-5)
    assert not torch.allclose(other, expected, atol=1e-3), "rounding to 8 bits shows"


NAME = "model.layers.1.mlp.experts.gate_up_proj"


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: one for key, one in tensors.items() if key != name}


def test_damaged_files_in_mxfp4_are_refused_in_a_line(tmp_path: Path) -> None:
    model, tensors = gpt_oss(tmp_path)
    blocks, scales = tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]
    cases: list[tuple[Tensors, str]] = [
        (without(tensors, f"{NAME}_scales"), r"gate_up_proj\[0\] should be \(64, 192\), is not there"),
        (tensors | {f"{NAME}_scales": scales[:, :, :1]}, "should be U8"),
        (tensors | {f"{NAME}_blocks": blocks[..., :8]}, "should be U8"),
        (tensors | {f"{NAME}_blocks": blocks[:2], f"{NAME}_scales": scales[:2]}, r"should be U8 \(3, rows"),
        (tensors | {f"{NAME}_scales": scales.float()}, "should be U8"),
        (
            tensors | {f"{NAME}_blocks": blocks[:, :64], f"{NAME}_scales": scales[:, :64]},
            r"gate_up_proj\[0\] should be \(64, 192\), is \(64, 64\)",
        ),
        (
            tensors | {"lm_head.weight": torch.zeros(90, 64, dtype=torch.uint8)},
            "lm_head.weight is stored as U8",
        ),
        (tensors | {NAME: torch.zeros(4, 64, 192)}, "should have 3 entries"),
    ]
    for number, (changed, told) in enumerate(cases):
        folder = written(model, tmp_path / str(number), changed, MXFP4)
        with pytest.raises(BadInputError, match=told) as caught:
            HuggingFaceWeights(folder)
        assert "\n" not in str(caught.value)


def test_damaged_files_in_fp8_are_refused_in_a_line(tmp_path: Path) -> None:
    model, tensors = deepseek(tmp_path)
    stored = quantized(tensors, (128, 128))
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    cases: list[tuple[Tensors, dict[str, Any], str]] = [
        (without(stored, scale), FP8, "o_proj.weight_scale_inv should be F32 .* is not there"),
        (stored | {scale: torch.ones(1, 2)}, FP8, r"should be F32 \(1, 1\), is F32 \(1, 2\)"),
        (stored, {}, "F8_E4M3"),
        (stored, FP8 | {"weight_block_size": None}, "weight_block_size"),
        (stored, FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (stored, FP8 | {"weight_block_size": [True, 2**40]}, "weight_block_size"),
        (stored, FP8 | {"activation_scheme": "static"}, "activation_scheme"),
        (stored, FP8 | {"twist": 3}, "quantization_config.twist"),
        (stored, {"quant_method": "gptq"}, "quant_method fp8 or mxfp4"),
        (stored, {"quant_method": ["fp8"]}, "quant_method fp8 or mxfp4"),
    ]
    for number, (changed, keys, told) in enumerate(cases):
        folder = written(model, tmp_path / str(number), changed, keys)
        with pytest.raises(BadInputError, match=told) as caught:
            HuggingFaceWeights(folder)
        assert "\n" not in str(caught.value)
