"""Decoders of checkpoints: Myriad's own, and those of other systems."""

import io
import json
import pickle
import struct
from contextlib import suppress
from functools import cache, partial
from typing import Any

import xxhash

from decoder_target import Target, scratch, scratch_file, write_scratch
from mutations import JSON, Codec, dump_json
from myriad.errors import MyriadError, RunFailedError

__all__ = ["CHECKPOINT_TARGETS"]


# Checkpoints


_MANIFEST: dict[str, Any] = {
    "version": 2,
    "step": 20,
    "attempt": 1,
    "time": 1.7e9,
    "progress": {"step": 20},
    "layout": {"dp": 1},
    "data": {"sample": 40},
    "versions": {"torch": "2.0"},
    "tensors": {
        "model.w": {"shape": [2, 3], "dtype": "float32"},
        "progress": {"shape": [4], "dtype": "uint8"},
    },
    "files": {
        ".metadata": {"bytes": 3, "xxh3_128": xxhash.xxh3_128_hexdigest(b"abc")},
        "__0_0.distcp": {
            "bytes": 44,
            "chunks": [
                {
                    "tensor": tensor,
                    "offsets": [0] * len(shape),
                    "shape": shape,
                    "start": start,
                    "head": 4,
                    "bytes": size,
                    "tail": 4,
                    "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(size)),
                    "envelope": xxhash.xxh3_128_hexdigest(bytes(8)),
                }
                for tensor, shape, start, size in (("model.w", [2, 3], 0, 24), ("progress", [4], 32, 4))
            ],
        },
    },
}


def _seal_manifest(value: Any) -> bytes:
    if not isinstance(value, dict):
        return dump_json(value)
    value = {key: one for key, one in value.items() if key != "xxh3_128"}
    own = xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
    return dump_json(value | {"xxh3_128": own})


def _manifest(data: bytes) -> None:
    from myriad.checkpoint.format.checkpoint_manifest import encode_manifest, parse_manifest

    again = encode_manifest(parse_manifest(data))
    assert encode_manifest(parse_manifest(again)) == again


def _stored_checkpoint(data: bytes) -> None:
    """Verify, list and open a checkpoint whose manifest is the input."""
    from myriad.checkpoint.checkpoint_files import load_model
    from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
    from myriad.checkpoint.storage.checkpoint_list import list_checkpoint

    if not (scratch() / "kept/step-20").is_dir():
        write_scratch("kept/step-20/.metadata", b"abc")
        write_scratch("kept/step-20/__0_0.distcp", bytes(44))
    write_scratch("kept/step-20/manifest.json", data)
    checkpoint = CheckpointFolder(scratch() / "kept").at_step(20)
    row = list_checkpoint(checkpoint)
    assert row["time"] is None or 0 <= row["time"] < 2**40
    if problems := verify(checkpoint):
        raise RunFailedError(problems[0])
    try:
        load_model(checkpoint.where)
    except RunFailedError as error:
        raise AssertionError("whole, and not loaded") from error


def _signature(data: bytes) -> None:
    from myriad.checkpoint.storage.signature import parse_signature

    parse_signature(data, _signature_key())


@cache
def _signature_key() -> Any:
    from myriad.checkpoint.storage.signature import load_key

    return load_key(write_scratch("signature-secret", b"s" * 40), "--key")


def _signed(value: Any) -> bytes:
    """Sign with the right key, as who has it."""
    if not isinstance(value, dict):
        return dump_json(value)
    signed = {key: one for key, one in value.items() if key != "signature"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
    return dump_json(signed | {"signature": _signature_key().sign(text).hex()})


def _signature_examples() -> list[bytes]:
    key = _signature_key()
    files = {"model.safetensors": {"bytes": 9, "sha256": "0" * 64}, "a/b": {"bytes": 0, "sha256": "1" * 64}}
    signed = {"format": "myriad-signature-1", "algorithm": key.algorithm, "key": key.key_id}
    return [_signed(signed | {"files": files})]


def _key_file(data: bytes) -> None:
    from myriad.checkpoint.storage.signature import load_key

    _ = load_key(write_scratch("key", data), "--key").key_id


_PEM = b"""-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
"""


_METADATA: dict[str, Any] = {
    "tensors": {
        "w": {
            "size": [2, 2],
            "chunks": [{"offsets": [0, 0], "sizes": [1, 2]}, {"offsets": [1, 0], "sizes": [1, 2]}],
        },
        "b": {"size": [3], "chunks": [{"offsets": [0], "sizes": [3]}]},
    },
    "places": [
        {"fqn": "w", "offset": [0, 0], "file": "__0_0.distcp", "at": 0, "length": 0},
        {"fqn": "w", "offset": [1, 0], "file": "__0_0.distcp", "at": 0, "length": 0},
        {"fqn": "b", "offset": [0], "file": "__0_0.distcp", "at": 0, "length": 0},
    ],
}


@cache
def _dcp_archives() -> tuple[bytes, dict[str, Any]]:
    """Return the content of a file of tensors, and the description of its ``.metadata``."""
    import torch

    described, content = json.loads(dump_json(_METADATA)), b""
    for place, tensor in zip(
        described["places"], (torch.ones(1, 2), torch.ones(1, 2), torch.ones(3)), strict=True
    ):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        place |= {"at": len(content), "length": len(stream.getvalue())}
        content += stream.getvalue()
    return content, described


def _pickled_metadata(value: Any) -> bytes:
    """Return ``.metadata`` with these values, also of wrong types."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: Any = value["tensors"]
    if isinstance(tensors, dict):
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(),
                _sequence(one.get("size")),
                [
                    ChunkStorageMetadata(_sequence(part["offsets"]), _sequence(part["sizes"]))
                    for part in one["chunks"]
                ]
                if isinstance(one["chunks"], list)
                else one["chunks"],
            )
            if isinstance(one, dict)
            else one
            for name, one in tensors.items()
        }
    found = Metadata({}, storage_data=None)
    object.__setattr__(found, "state_dict_metadata", tensors)
    object.__setattr__(found, "storage_data", value["places"])
    if isinstance(value["places"], list):
        places = {}
        for at in value["places"]:
            index = MetadataIndex("", None)
            object.__setattr__(index, "fqn", at.get("fqn"))
            object.__setattr__(index, "offset", _sequence(at.get("offset")))
            places[index] = _StorageInfo(at.get("file"), at.get("at"), at.get("length"))
        object.__setattr__(found, "storage_data", places)
    return pickle.dumps(found)


def _sequence(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _dcp_folder(data: bytes) -> None:
    from myriad.checkpoint.foreign.archives import DcpFolder

    if not (scratch() / "dcp/__0_0.distcp").is_file():
        write_scratch("dcp/__0_0.distcp", _dcp_archives()[0])
    write_scratch("dcp/.metadata", data)
    folder = DcpFolder(scratch() / "dcp", "CHECKPOINT")
    for name in folder.shapes:
        folder.read(name)


def _load_metadata(data: bytes) -> Any:
    """Return the described values: the mutations of fields begin with them, whatever the bytes."""
    return _dcp_archives()[1]


def _torch_archive(data: bytes) -> None:
    from myriad.checkpoint.foreign.archives import bounded, read_archive

    found = read_archive(write_scratch("archive.pt", data), "CHECKPOINT")
    for name, value in found.items() if isinstance(found, dict) else ():
        bounded(value, str(name), "archive.pt", "CHECKPOINT")


def _torch_examples() -> list[bytes]:
    import torch

    stream = io.BytesIO()
    torch.save({"w": torch.ones(4, 2), "b": torch.zeros(3)}, stream)
    return [stream.getvalue()]


def _megatron_checkpoint(data: bytes) -> None:
    """A namespace of arguments, as a checkpoint holds it; the input is its values."""
    from argparse import Namespace

    import torch

    from myriad.checkpoint.foreign.megatron_checkpoint import open_megatron

    values = json.loads(data)
    assert isinstance(values, dict)
    folder = scratch_file("megatron/mp_rank_00/model_optim_rng.pt")
    torch.save(values | {"args": Namespace(**values["args"]), "model": {}, "checkpoint_version": 3.0}, folder)
    open_megatron(scratch() / "megatron")


_ROPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": [2],
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 8,
}


_PHI3: dict[str, Any] = {"model_type": "phi3", "tie_word_embeddings": False, "partial_rotary_factor": 0.5}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "head_dim": None,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1,
    },
}
_MINICPM: dict[str, Any] = {
    "model_type": "minicpm",
    "scale_emb": 12,
    "dim_model_base": 4,
    "scale_depth": 1.4,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": None,
}


@cache
def _config_examples() -> tuple[bytes, ...]:
    """Return a file of each model type of which there is a recipe, and short ones of others."""
    from myriad.checkpoint.foreign.hugging_face_config import config_of
    from myriad.model.config import ModelConfig
    from myriad.recipes import read_recipe, recipe_names

    found = {}
    for name in recipe_names("models"):
        with suppress(MyriadError):  # no model type computes the same
            config = config_of(ModelConfig(**read_recipe("models", name, "model")), "float32", 0)
            found[config["model_type"]] = dump_json(config)
    short = (_ROPE, _GPT2, _ROPE | _PHI3, _ROPE | _DEEPSEEK, _ROPE | _MINICPM)
    return *map(dump_json, short), *found.values()


def _hugging_face_config(data: bytes) -> None:
    from myriad.checkpoint.foreign.hugging_face import end_of_text
    from myriad.checkpoint.foreign.hugging_face_config import config_of, model_of
    from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
    from myriad.system.whole_file import parse_json

    try:
        found = parse_json(data)
    except ValueError:
        return
    if isinstance(found, dict):
        model = model_of(found)
        tensor_mappings(model.model_copy(update={"layers": min(4, model.layers)}), found["model_type"])
        config_of(model, "float32", 0)
        write_scratch("config/config.json", data)
        end_of_text(scratch() / "config")


def _hugging_face_folder(data: bytes, name: str) -> None:
    from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights

    folder = f"hf-{name}"
    if not (scratch() / folder).is_dir():
        write_scratch(f"{folder}/config.json", dump_json(_ROPE))
        write_scratch(f"{folder}/model.safetensors", _safetensors_examples()[0])
    write_scratch(f"{folder}/{name}", data)
    weights = HuggingFaceWeights(scratch() / folder)
    for one in weights.shapes:
        weights.read(one)


def _safetensors_examples() -> list[bytes]:
    import torch
    from safetensors.torch import save

    from myriad.checkpoint.foreign.hugging_face_config import model_of
    from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings

    shapes = {
        name: shape for one in tensor_mappings(model_of(_ROPE)) for name, shape in one.their_shapes().items()
    }
    return [save({name: torch.ones(shape) for name, shape in shapes.items()}, {"format": "pt"})]


_MXFP4 = _ROPE | {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 32,
    "attention_bias": True,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "quantization_config": {"quant_method": "mxfp4"},
}
_FP8 = {**_ROPE, **_DEEPSEEK} | {
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]},
}
_QUANTIZED = {"fp8": _FP8, "mxfp4": _MXFP4}


def _quantized_folder(data: bytes, kind: str) -> None:
    from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights

    if not (scratch() / kind).is_dir():
        write_scratch(f"{kind}/config.json", dump_json(_QUANTIZED[kind]))
    write_scratch(f"{kind}/model.safetensors", data)
    weights = HuggingFaceWeights(scratch() / kind)
    for one in weights.shapes:
        weights.read(one)


def _quantized_examples(kind: str) -> list[bytes]:
    """Return a file in which every matrix that may be quantized is."""
    import torch
    from safetensors.torch import save

    from myriad.checkpoint.foreign.hugging_face_config import model_of
    from myriad.checkpoint.foreign.hugging_face_names import prediction_mappings, tensor_mappings
    from myriad.checkpoint.foreign.hugging_face_sources import stack_of

    config = _QUANTIZED[kind]
    further = config.get("num_nextn_predict_layers", 0)
    model = model_of(config).model_copy(update={"prediction_layers": further})
    mappings = (
        *tensor_mappings(model, config["model_type"]),
        *prediction_mappings(model, config["model_type"]),
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in {key: one for own in mappings for key, one in own.their_shapes().items()}.items():
        stack = stack_of(name)
        if stack is not None and len(shape) == 2:
            groups = (config["num_local_experts"], shape[1], shape[0] // 32)
            tensors[f"{stack[0]}_blocks"] = torch.full((*groups, 16), 0x21, dtype=torch.uint8)
            tensors[f"{stack[0]}_scales"] = torch.full(groups, 127, dtype=torch.uint8)
        elif stack is not None:
            tensors[stack[0]] = torch.ones(config["num_local_experts"], *shape)
        elif kind == "fp8" and len(shape) == 2:
            tensors[name] = torch.ones(shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(-(-shape[0] // 4), -(-shape[1] // 4))
        else:
            tensors[name] = torch.ones(shape)
    return [save(tensors, {"format": "pt"})]


def _load_safetensors(data: bytes) -> Any:
    (size,) = struct.unpack_from("<Q", data)
    return {"head": json.loads(data[8 : 8 + size]), "rest": data[8 + size :].hex()}


def _dump_safetensors(value: Any) -> bytes:
    head = dump_json(value["head"])
    return struct.pack("<Q", len(head)) + head + bytes.fromhex(value["rest"])


def _index_examples() -> list[bytes]:
    names = _load_safetensors(_safetensors_examples()[0])["head"].keys() - {"__metadata__"}
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    return [dump_json(index)]


CHECKPOINT_TARGETS: tuple[Target, ...] = (
    Target(
        "checkpoint: manifest",
        _manifest,
        lambda: [_seal_manifest(_MANIFEST)],
        Codec(json.loads, _seal_manifest, sealed=True),
        (ValueError,),
    ),
    Target(
        "checkpoint: verify, list, load",
        _stored_checkpoint,
        lambda: [_seal_manifest(_MANIFEST)],
        Codec(json.loads, _seal_manifest, sealed=True),
        slow=True,
    ),
    Target(
        "signature",
        _signature,
        _signature_examples,
        Codec(json.loads, _signed, sealed=True),
        (ValueError,),
    ),
    Target("key file", _key_file, lambda: [_PEM, b"s" * 40]),
    Target(
        "DCP: .metadata",
        _dcp_folder,
        lambda: [_pickled_metadata(_dcp_archives()[1])],
        Codec(_load_metadata, _pickled_metadata),
        slow=True,
    ),
    Target("torch.save archive", _torch_archive, _torch_examples, slow=True),
    Target("Hugging Face: config.json", _hugging_face_config, _config_examples, JSON),
    Target(
        "Hugging Face: safetensors",
        partial(_hugging_face_folder, name="model.safetensors"),
        _safetensors_examples,
        Codec(_load_safetensors, _dump_safetensors, sealed=True),
        slow=True,
    ),
    *(
        Target(
            f"Hugging Face: safetensors in {kind}",
            partial(_quantized_folder, kind=kind),
            partial(_quantized_examples, kind=kind),
            Codec(_load_safetensors, _dump_safetensors, sealed=True),
            slow=True,
        )
        for kind in _QUANTIZED
    ),
    Target(
        "Hugging Face: index",
        partial(_hugging_face_folder, name="model.safetensors.index.json"),
        _index_examples,
        JSON,
        slow=True,
    ),
)
