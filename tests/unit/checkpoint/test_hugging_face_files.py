"""If these fail, a folder from elsewhere ends an import in a traceback, is half read, or leads to files
outside it."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights, copy_companions, end_of_text
from myriad.checkpoint.foreign.hugging_face_config import kind_of, model_of
from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
from myriad.errors import BadInputError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 24, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 6}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24,
    "n_inner": None, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
NEOX = {
    "model_type": "gpt_neox", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
ONE, TWO, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "weight_map"


def theirs(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    shapes = {
        name: shape
        for mapping in tensor_mappings(model_of(config))
        for name, shape in mapping.their_shapes().items()
    }
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """In two files, with an index."""
    tensors = theirs(LLAMA)
    names = sorted(tensors)
    halves = {ONE: names[:9], TWO: names[9:]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_index(tmp_path, {name: file for file, own in halves.items() for name in own})
    return tmp_path


def write_index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({INDEX: places}))


def refusal(folder: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        HuggingFaceWeights(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def places_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())[INDEX]
    return found


@pytest.mark.parametrize(
    "value", [None, 0, -1, True, 1.5, "x", "8", [1], {}, {"a": 1}, 10**30, math.nan, math.inf, [[]]], ids=repr
)
@pytest.mark.parametrize("config", [MISTRAL, GPT2], ids=["mistral", "gpt2"])
def test_odd_values_of_every_field_are_taken_or_refused_in_a_line(config: dict[str, Any], value: Any) -> None:
    for key in [
        *config,
        "rope_parameters",
        "rope_scaling",
        "attention_bias",
        "a_new_field",
        "scale_attn_weights",
    ]:
        try:
            model = model_of(config | {key: value})
        except BadInputError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            own = {name for name in model.model_dump() if isinstance(getattr(model, name), float)}
            assert all(math.isfinite(getattr(model, name)) for name in own), (key, value)
            assert not isinstance(value, bool | str) or key.startswith(("tie", "attention_bias", "scale"))


def test_zero_heads_of_keys_are_not_as_many_as_of_queries() -> None:
    with pytest.raises(BadInputError, match="num_key_value_heads = 0: a whole number of at least 1"):
        model_of(LLAMA | {"num_key_value_heads": 0})


DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "first_k_dense_replace": 2, "n_routed_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip


def test_fields_of_experts_have_no_effect_if_all_layers_are_dense() -> None:
    assert model_of(DEEPSEEK).latent is not None and model_of(DEEPSEEK).experts is None
    for wrong, error in (
        ({"first_k_dense_replace": 1, "n_group": 512}, "router_groups = 512: a divisor of the 256 experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"rope_interleave": False}, "rope_interleave"),
    ):
        with pytest.raises(BadInputError, match=error):
            model_of(DEEPSEEK | wrong)


def test_a_model_that_cannot_be_exported_is_told_the_key_to_change() -> None:
    latent = model_of(DEEPSEEK)
    for change, asked, error in (
        ({"activation": "gelu"}, "deepseek_v2", 'model.activation = "gelu": swiglu in deepseek_v2'),
        ({"activation": "gelu"}, None, 'model.activation = "gelu": swiglu in deepseek_v3'),
        (
            {},
            "llama",
            '--model-type = "llama": one of deepseek_v3, deepseek_v2, minicpm3: this model has latent att',
        ),
    ):
        with pytest.raises(BadInputError, match=error):
            kind_of(latent.model_copy(update=change), asked)
    assert kind_of(latent) == "deepseek_v3"


def test_a_whole_folder_in_two_files_is_read(sharded: Path) -> None:
    assert HuggingFaceWeights(sharded).read("head.norm.weight").tolist() == [0.5] * 32
    assert end_of_text(sharded) == []


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "", ".", "..", 7, None, ["x"], "gone"]
)
def test_an_index_names_only_files_of_its_folder(sharded: Path, name: Any) -> None:
    (sharded.parent / "x.safetensors").write_bytes((sharded / ONE).read_bytes())
    write_index(sharded, places_of(sharded) | {"model.norm.weight": name})
    assert "model.norm.weight must be in a file of this folder" in refusal(sharded)


@pytest.mark.parametrize("prefix", ["gpt_neox.", ""], ids=["language model", "base model"])
def test_masks_that_pythias_files_hold_are_not_taken_for_weights(tmp_path: Path, prefix: str) -> None:
    tensors = {name.replace("gpt_neox.", prefix): values for name, values in theirs(NEOX).items()}
    tensors[f"{prefix}layers.0.attention.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    tensors[f"{prefix}layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(NEOX))
    assert HuggingFaceWeights(tmp_path).read("head.norm.weight").tolist() == [0.5] * 32


@pytest.mark.parametrize("places", [None, [], {}, "x", 7, [["a", "b"]]], ids=repr)
def test_an_index_without_a_map_is_refused(sharded: Path, places: Any) -> None:
    write_index(sharded, places)
    assert "must have a weight_map" in refusal(sharded)


def test_files_that_contradict_their_index_are_refused(sharded: Path) -> None:
    places = places_of(sharded)
    write_index(sharded, places | {"model.norm.weight": ONE})
    assert f"model.norm.weight should be in {ONE}, is in {TWO}" in refusal(sharded)
    write_index(sharded, places | {"model.more.weight": ONE})
    assert "model.more.weight should be in" in refusal(sharded)
    write_index(sharded, places)
    (sharded / TWO).write_bytes((sharded / ONE).read_bytes())
    assert "as well" in refusal(sharded)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"{", b"\xff\xfe", b"7", b"[]", b'{"a": 1e999}'])
def test_json_that_is_none_is_refused_in_a_line(sharded: Path, file: str, content: bytes) -> None:
    (sharded / file).write_bytes(content)
    refusal(sharded)


HEADERS = [
    {"model.norm.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 8]}},
    {"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
     "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
    {"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    {"model.norm.weight": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    {"model.norm.weight": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=["huge", "overlap", "backwards", "negative", "type"])
def test_headers_that_lie_are_refused(sharded: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (sharded / TWO).write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    assert TWO in refusal(sharded)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_byte_of_a_header_never_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("hf")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(theirs(LLAMA), folder / "model.safetensors")
    content = bytearray((folder / "model.safetensors").read_bytes())
    size = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        HuggingFaceWeights(folder)
    except BadInputError as error:
        assert "\n" not in str(error)


def test_positions_of_a_type_of_layer_must_be_an_object() -> None:
    types = {"full_attention": {"rope_type": "default"}, "sliding_attention": "{}"}
    olmo = LLAMA | {"model_type": "olmo3", "sliding_window": 6, "rope_parameters": types}
    with pytest.raises(BadInputError, match=r"rope_parameters\.sliding_attention = .*: an object"):
        model_of(olmo)


def test_a_scale_without_an_inverse_square_is_of_no_gemma() -> None:
    granite = model_of(LLAMA | {"model_type": "granite", "attention_multiplier": 1e-300})
    assert kind_of(granite) == "granite"
    with pytest.raises(BadInputError):
        kind_of(granite, "gemma2")


def test_a_large_config_takes_no_memory(tmp_path: Path) -> None:
    """A sparse file takes none of the disk, and would take all memory."""
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        with (tmp_path / name).open("w") as file:
            file.truncate(2**40)
        with pytest.raises(BadInputError, match="has more than"):
            HuggingFaceWeights(tmp_path)


def test_a_short_config_is_no_list_of_millions_of_heads() -> None:
    """Queries and keys are mapped head by head."""
    many = {"num_attention_heads": 2**16, "hidden_size": 2**17, "intermediate_size": 64}
    for layers in (5, 10_000):
        with pytest.raises(BadInputError, match="at most 262,144 in the"):
            model_of(NEOX | many | {"num_hidden_layers": layers})


def test_companions_are_files_of_the_folder_and_of_no_other_place(tmp_path: Path) -> None:
    """The folder may come from anyone, and an export publishes its companions."""
    (tmp_path / "private.key").write_text("a key of the user")
    folder, blobs = tmp_path / "cache" / "snapshots" / "1f", tmp_path / "cache" / "blobs"
    for each in (folder, blobs):
        each.mkdir(parents=True)
    (blobs / "ab").write_text("{{ messages }}")
    (folder / "chat_template.jinja").symlink_to("../../blobs/ab")  # as Hugging Face's cache has it
    copy_companions(folder, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    (folder / "generation_config.json").symlink_to(tmp_path / "private.key")
    with pytest.raises(BadInputError, match=r"generation_config\.json.*not a link to another place"):
        copy_companions(folder, tmp_path / "other")
    assert not (tmp_path / "other" / "generation_config.json").exists()


PHI3 = LLAMA | {"model_type": "phi3", "tie_word_embeddings": False, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("config", [LLAMA, PHI3, GPT2, NEOX], ids=["llama", "phi3", "gpt2", "gpt_neox"])
def test_any_part_of_a_tensor_equals_that_part_of_the_whole(config: dict[str, Any], tmp_path: Path) -> None:
    """Three tensors or one, transposed, in groups, rotary pairs: cut anywhere, also inside a head."""
    generator = torch.Generator().manual_seed(3)
    random = {name: torch.randn(x.shape, generator=generator) for name, x in theirs(config).items()}
    save_file(random, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = HuggingFaceWeights(tmp_path)
    for name, shape in weights.shapes.items():
        whole = weights.read(name)
        rows, columns = shape[0], shape[1:]
        for first, last in [(0, rows // 2), (rows // 2, rows), (rows // 3, rows // 3 + 1), (5, rows - 3)]:
            box = (slice(first, last), *(slice(size // 4, size // 2) for size in columns))
            (part,) = weights.read_parts(name, [box])
            assert torch.equal(part, whole[box]), (name, box)
    before, half = weights.bytes_read, slice(0, weights.shapes["blocks.0.mlp.down.weight"][1] // 2)
    list(weights.read_parts("blocks.0.mlp.down.weight", [(slice(0, 32), half)]))
    assert weights.bytes_read - before == 32 * half.stop * 4, "no other columns are read"


def test_a_file_that_changes_after_its_header_was_read_is_refused(sharded: Path) -> None:
    weights = HuggingFaceWeights(sharded)
    with (sharded / TWO).open("r+b") as file:
        file.truncate(300)
    with pytest.raises(BadInputError, match=r"is not readable \(was changed while it was read\)"):
        weights.read("head.norm.weight")
