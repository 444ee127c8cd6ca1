"""If these fail, a file or a message from someone else ends a command in a traceback, makes it hang, or
takes memory for what a header claims. `benchmarks/security/fuzz.py` does the same with millions of inputs."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from decoders import (
    TARGETS,
    Target,
    check,
)
from mutations import mutate
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import BadInputError

BY_NAME = {target.name: target for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_examples_are_read(target: Target) -> None:
    read = [check(target, example) for example in target.examples()]
    assert all(read) == target.examples_are_read


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_changed_input_is_read_or_refused_in_one_line(target: Target) -> None:
    examples = list(target.examples())

    @settings(max_examples=60 if target.slow else 200, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32 - 1))
    def decode(seed: int) -> None:
        draw = Random(seed)
        data = mutate(draw.choice(examples), target.codec, draw)
        check(target, data if draw.random() < 0.7 else mutate(data, target.codec, draw))

    decode()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(
    "data", [b"", b"\0", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe", b"9" * 6000], ids=len
)
def test_input_of_another_kind_is_read_or_refused_in_one_line(target: Target, data: bytes) -> None:
    check(target, data)


def changed(name: str, path: tuple[Any, ...], value: Any) -> bytes:
    """Return the first example of a target with another value at a path."""
    codec = BY_NAME[name].codec
    tree = json.loads(json.dumps(codec.load(BY_NAME[name].examples()[0])))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return codec.dump(tree)


MANIFEST, LOADED, DCP, INDEX = (
    "checkpoint: manifest",
    "checkpoint: verify, list, load",
    "DCP: .metadata",
    "corpus: index",
)
HF, MEGATRON, SPARE = "Hugging Face: index", "Megatron-LM: arguments", ("tensors", "spare")
DOUBLES = {"type": "Replace", "pattern": {"String": "t"}, "content": "tt"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
FOUND = [
    (LOADED, SPARE, {"shape": [2**40], "dtype": "float32"}),  # allocated before it was known to be absent
    (LOADED, SPARE, {"shape": [2**70], "dtype": "float32"}),
    (LOADED, SPARE, {"shape": [0], "dtype": "load"}),  # an attribute of torch
    (LOADED, SPARE, {}),
    (LOADED, ("time",), float("nan")),  # the list shows it as a date
    (LOADED, ("time",), 1e300),
    (LOADED, ("files", "__0_0.distcp", "chunks", 1, "start"), 0),  # verified in order, loaded by offset
    (DCP, ("tensors", "w", "size"), 7),
    (DCP, ("tensors", "w", "size"), [2.5, 2]),
    (DCP, ("tensors", "w", "size"), [2**40, 2**40]),
    (DCP, ("tensors", "w", "chunks"), "x"),
    (DCP, ("tensors", "w", "chunks", 0, "offsets"), ["0", 0]),
    (DCP, ("tensors", "w", "chunks", 0, "sizes"), None),
    (DCP, ("places", 0, "length"), float("nan")),
    (DCP, ("places", 0, "at"), [0]),
    (DCP, ("places", 0, "file"), "x" * 300),
    (DCP, ("places", 0, "file"), "a\0b"),
    (HF, ("weight_map", "lm_head.weight"), "x" * 300),
    ("Hugging Face: config.json", ("\nrope",), 2),
    (INDEX, ("documents",), [0, 2, 2]),  # an empty last document
    ("corpus: manifest", ("shards", 0, "tokens"), -1),
    ("tokenizer.json", ("model", "vocab"), {"A": 0}),  # the unknown token has no number
    ("tokenizer.json", ("normalizer",), {"type": "Sequence", "normalizers": [DOUBLES] * 60}),
    ("tokenizer.json", ("pre_tokenizer",), {"type": "Sequence", "pretokenizers": [BYTES] * 60}),
    ("tokenizer.json", ("decoder",), {"type": "Sequence", "decoders": [DOUBLES] * 60}),
    ("job file", ("a\nb",), 2),
    ("cluster file", ("\u2028",), 2),
    ("fault scenario", ("soak",), {"minutes": 1e300, "faults_per_minute": 1e300}),
    ("fault scenario", ("soak",), {"minutes": 0.5, "faults_per_minute": 5e-324}),
    ("fault mix", ("days",), 5e-324),
    (MEGATRON, ("lr",), 10**400),
    (MEGATRON, ("lr",), 5e-324),
    (MEGATRON, ("lr_decay_style",), ["cosine"]),
    (MEGATRON, ("data_path",), [10**400, "a", 1, "b"]),
    ("DeepSpeed: JSON", ("fp16", "loss_scale_window"), 10**400),
    ("DeepSpeed: JSON", ("fp16", "min_loss_scale"), float("nan")),
    ("run: driver.json", ("host",), "a\u2028b"),
    ("link counters", (1, 2), 10**400),
    ("link counters", (1, 2), float("nan")),
]


@pytest.mark.parametrize(("name", "path", "value"), FOUND)
def test_values_that_once_ended_in_a_traceback(name: str, path: tuple[Any, ...], value: Any) -> None:
    check(BY_NAME[name], changed(name, path, value))


def test_files_that_once_ended_in_a_traceback() -> None:
    config = BY_NAME["Hugging Face: config.json"]
    kept = next(one for one in map(json.loads, config.examples()) if one["model_type"] == "deepseek_v3")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1e300}
    assert not check(config, json.dumps(kept | {"rope_parameters": rope}).encode())
    check(BY_NAME["corpus: manifest"], b'["text"]')
    archive = bytearray(BY_NAME["torch.save archive"].examples()[0])
    place = archive.index(b"PK\x01\x02")
    archive[place + 6] = 127  # a version of zip to come
    check(BY_NAME["torch.save archive"], bytes(archive))


def test_metadata_takes_no_memory_or_time_beyond_its_size() -> None:
    """A large number of an entry, a large size of a byte array, a key of exponential time, a class."""
    metadata = BY_NAME[DCP].examples()[0]
    twice = b"\x86".join([b")"] + [b"q\x00h\x00"] * 60) + b"\x86"
    for pickled in (
        b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".",
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
        b"\x80\x04}" + twice + b"Ns.",
        b"\x80\x04}(" + twice + b"Nu.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\x00\x00\x00aNsb.",
    ):
        assert not check(BY_NAME[DCP], pickled)
    assert check(BY_NAME[DCP], metadata)


FORMATS = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
MEMBER = b"cbuiltins\ngetattr\n" + FORMATS + b"X\x15\x00\x00\x00TORCH_PRESERVE_FORMAT\x86R"


def test_metadata_changes_no_class_function_or_constant_of_the_process() -> None:
    """What an attribute is set on lives as long as the process, and belongs to torch."""
    member, layout = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT, torch.serialization._get_layout
    before = member.value, layout.__defaults__, layout.__doc__
    for changed_object in (MEMBER, FORMATS, b"ctorch.serialization\n_get_layout\n"):
        for name, value in (
            (b"_value_", b"K\x09"),
            (b"__defaults__", b"K\x01\x85"),
            (b"__doc__", b"X\0\0\0\0"),
        ):
            state = b"}X" + len(name).to_bytes(4, "little") + name + value + b"s"
            for how in (state, b"N" + state + b"\x86"):
                assert not check(BY_NAME[DCP], b"\x80\x02" + changed_object + how + b"b.")
    assert (member.value, layout.__defaults__, layout.__doc__) == before


def test_an_error_is_one_short_line_whatever_it_names() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, 10**6000, deep, "a\nb\x1b"):
        text = str(BadInputError("key\n\x1b[2J", value, "must be\nshort"))
        assert text.isprintable() and len(text) < 600


def test_a_folder_with_a_digit_that_is_no_number_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step-²", "step-3", "step-².damaged"):
        (tmp_path / name).mkdir()
    folder = CheckpointFolder(tmp_path)
    assert (folder.steps(), folder.unfinished(), folder.damaged()) == ([], [3], [])
