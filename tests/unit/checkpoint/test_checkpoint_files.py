"""If these fail, what was written is not what is read, or a kill leaves half a file under a good name."""

import errno
import fcntl
import json
import os
import pickle
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.checkpoint.format.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    encode_manifest,
    hash_of,
    parse_manifest,
    record_plain_file,
    record_shards,
)
from myriad.checkpoint.format.dcp_metadata import make_metadata
from myriad.checkpoint.format.stored_shard import (
    FILE_BYTES,
    StoredShard,
    decode_shards,
    encode_shards,
    files_of_rank,
    snapshot_bytes,
)
from myriad.checkpoint.storage.direct_io import aligned_memory
from myriad.checkpoint.storage.storage_backends import LocalStorage, open_storage
from myriad.checkpoint.storage.verified_files import check_file, write_pieces
from myriad.errors import BadInputError
from myriad.wire.socket_channel import Closed, SocketChannel

SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2_000_000), st.integers(0, 40)), max_size=6)


def pieces_of(sizes) -> tuple[list[StoredShard], dict[str, bytes]]:
    pieces, data, start = [], {}, 0
    for number, (head, size, tail) in enumerate(sizes):
        name = f"t{number}"
        data[name] = os.urandom(size)
        pieces.append(
            StoredShard(name, (size,), "uint8", (0,), (size,), size, start, b"h" * head, b"t" * tail)
        )
        start += size
    return pieces, data


@settings(deadline=None)
@given(SIZES, st.data())
def test_a_file_of_pieces_is_read_back_and_any_changed_byte_is_named_by_its_chunk(
    tmp_path_factory, sizes, draw
):
    storage = LocalStorage(tmp_path_factory.mktemp("files"))
    pieces, data = pieces_of(sizes)
    record = write_pieces(storage, "a/file", pieces, lambda piece: memoryview(data[piece.tensor]))
    assert record == record_shards(pieces, [hash_of(data[piece.tensor]) for piece in pieces])
    assert check_file(storage, "a/file", record) == []
    assert check_file(storage, "a/file", record, past_cache=True) == []
    path, size = storage.root / "a/file", record.bytes
    assert path.stat().st_size == size
    if size:
        at = draw.draw(st.integers(0, size - 1))
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << draw.draw(st.integers(0, 7))
        path.write_bytes(content)
        (number,) = (n for n, chunk in enumerate(record.chunks) if chunk.start <= at < chunk.stop)
        (problem,) = check_file(storage, "a/file", record)
        assert problem.startswith(f"chunk {number} (t{number}[")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 2**22 - 1, 2**22, 2**22 + 1, 9_999_999])
@pytest.mark.parametrize("refuses", ["nothing", "opening", "reads and writes"])
def test_a_file_past_the_cache_is_the_same_whatever_the_file_system_can_do(
    size: int, refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refuses != "nothing":
        refuse_direct(monkeypatch, opening=refuses == "opening")
    content = os.urandom(size)
    storage = LocalStorage(tmp_path)
    (tmp_path / "file").write_bytes(b"older and longer" * 1_000_000)
    with storage.create("file") as sink:
        for start in range(0, size, 3_000_001):
            sink.write(content[start : start + 3_000_001])
    assert (tmp_path / "file").read_bytes() == content
    block = aligned_memory(size + 1)
    assert storage.read_stored("file", 0, block) == size and block[:size] == content


def refuse_direct(monkeypatch: pytest.MonkeyPatch, opening: bool) -> None:
    """What a file system without O_DIRECT says: to the call that opens, or to those that read and write."""
    open_, pwrite, preadv = os.open, os.pwrite, os.preadv

    def check(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    def refusing_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if opening and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_(path, flags, *rest, **more)

    def refusing_pwrite(descriptor: int, *rest: Any) -> int:
        check(descriptor)
        return pwrite(descriptor, *rest)

    def refusing_preadv(descriptor: int, *rest: Any) -> int:
        check(descriptor)
        return preadv(descriptor, *rest)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    monkeypatch.setattr(os, "preadv", refusing_preadv)


@given(SIZES)
def test_pieces_survive_the_way_to_another_process(sizes):
    pieces, data = pieces_of(sizes)
    assert decode_shards(*encode_shards(pieces)) == pieces
    assert snapshot_bytes(pieces) == sum(map(len, data.values()))


def test_a_rank_with_much_state_has_several_files_that_hold_each_piece_once():
    sizes = [(10, size, 10) for size in (100, FILE_BYTES, 5, 5, FILE_BYTES // 2, FILE_BYTES // 2)]
    around = (b"h" * 10, b"t" * 10)
    pieces = [
        StoredShard(f"t{n}", (), "uint8", (), (), size, 0, *around) for n, (_, size, _) in enumerate(sizes)
    ]
    files = files_of_rank(3, pieces)
    assert [name for name, _ in files] == [f"__3_{number}.distcp" for number in range(len(files))]
    assert [piece for _, own in files for piece in own] == pieces
    assert all(sum(piece.file_bytes for piece in own) <= FILE_BYTES or len(own) == 1 for _, own in files)
    assert files_of_rank(0, []) == [("__0_0.distcp", [])]


def test_a_manifest_is_read_as_written_and_not_otherwise():
    pieces, data = pieces_of([(3, 5, 2), (0, 0, 4)])
    files = {"f": record_shards(pieces, [hash_of(x) for x in data.values()]), "g": record_plain_file(b"abc")}
    tensors = {name: {"shape": [size], "dtype": "uint8"} for name, size in (("t0", 5), ("t1", 0))}
    manifest = CheckpointManifest(
        7, 2, 1.5, {"step": 7}, {"dp": 2}, {"samples": 9}, {"myriad": "1"}, tensors, files
    )
    content = encode_manifest(manifest)
    assert parse_manifest(content) == manifest and manifest.num_bytes == files["f"].bytes + 3
    assert StoredFile.parse(files["f"].as_json()) == files["f"]
    with pytest.raises(ValueError, match="changed"):
        parse_manifest(content.replace(b'"step": 7', b'"step": 8', 1))
    newer = content.replace(b'"version": 2', b'"version": 3')
    with pytest.raises(ValueError, match="changed"):
        parse_manifest(newer)
    assert replace(manifest, step=8) != manifest


FILES, CHUNK = ("files",), ("files", "__0_0.distcp", "chunks", 0)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ((*FILES, "../../../../etc/passwd"), {"bytes": 9, "xxh3_128": "0"}, "is not a file name"),
        ((*FILES, "a\\b"), {"bytes": 9, "xxh3_128": "0"}, "is not a file name"),
        ((*FILES, ".."), {"bytes": 9, "xxh3_128": "0"}, "is not a file name"),
        (FILES, [], "files: "),
        ((*FILES, "__0_0.distcp"), 7, "files.__0_0.distcp: "),
        ((*CHUNK, "start"), -8, "bytes -8 to 3 of 11"),
        ((*CHUNK, "head"), 2**62, "of 11"),
        ((*CHUNK, "start"), "0", "start: "),
        ((*CHUNK, "bytes"), 6, "6 bytes of uint8"),
        ((*CHUNK, "offsets"), [4], "not a part of [5]"),
        ((*CHUNK, "shape"), [5, 1], "not a part of [5]"),
        ((*CHUNK, "tensor"), "other", "not a tensor of the checkpoint"),
        (("tensors", "t0", "dtype"), "load", "the tensor's type is 'load'"),
        (("tensors", "t0", "shape"), [-5], "the tensor's shape is [-5]"),
        (("tensors", "t0", "shape"), "5", "the tensor's shape is '5'"),
        (("step",), "7", "step: "),
        (("progress",), None, "progress: "),
        ((*FILES, "manifest.json"), {"bytes": 9, "xxh3_128": "0" * 32}, "is not a file name"),
        ((*FILES, "a\nb"), {"bytes": 9, "xxh3_128": "0" * 32}, "is not a file name"),
        ((*FILES, "x" * 300), {"bytes": 9, "xxh3_128": "0" * 32}, "is not a file name"),
        ((*FILES, "a"), {"bytes": 9, "xxh3_128": "0"}, "needs one hash of 32 hexadecimal digits, or chunks"),
        (
            (*FILES, "__0_0.distcp", "xxh3_128"),
            "0" * 32,
            "needs one hash of 32 hexadecimal digits, or chunks",
        ),
        ((*FILES, "a"), {"bytes": -1, "xxh3_128": "0" * 32}, "has -1 bytes"),
        ((*FILES, "a"), {"bytes": 9, "chunks": []}, "a has 9 bytes, and its chunks 0"),
        ((*CHUNK, "start"), 1, "must begin at byte 0"),
        ((*CHUNK, "tail"), 0, "its chunks 8"),
        ((*CHUNK, "head"), -1, "head and tail have -1"),
        ((*CHUNK, "envelope"), "", "its hashes must have 32 hexadecimal digits"),
        (("tensors", "t1"), {"shape": [2**40], "dtype": "float32"}, "t1 is not whole"),
        (("tensors", "t\x1b"), {"shape": [0], "dtype": "float32"}, "is not a name of a tensor"),
        (("tensors", "t0", "shape"), [True], "the tensor's shape is [True]"),
        (("tensors", "t0"), {}, "the tensor's shape is None"),
        (("step",), -1, "step is -1: must be 0 to"),
        (("step",), 10**1000, "step is a number of 3322 bits"),
        (("attempt",), -1, "attempt is -1: must be 0 to"),
        (("time",), float("nan"), "time is nan: must be 0 to"),
        (("time",), 1e300, "time is 1e+300: must be 0 to"),
    ],
)
def test_a_manifest_of_a_stranger_describes_a_checkpoint_or_is_refused(place, value, says):
    """Its hash is right: the hash proves that nothing changed, not who wrote it."""
    pieces, data = pieces_of([(3, 5, 3)])
    files = {"__0_0.distcp": record_shards(pieces, [hash_of(x) for x in data.values()])}
    tensors = {"t0": {"shape": [5], "dtype": "uint8"}}
    right = CheckpointManifest(7, 2, 1.5, {}, {}, {}, {}, tensors, files)
    tree = json.loads(encode_manifest(right))
    tree.pop("xxh3_128")
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    content = json.dumps(tree | {"xxh3_128": hash_of(json.dumps(tree, sort_keys=True).encode())}).encode()
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        parse_manifest(content)
    assert "\n" not in str(refused.value)


def test_a_format_of_a_newer_program_is_reported_as_such(monkeypatch):
    import myriad.checkpoint.format.checkpoint_manifest as module

    monkeypatch.setattr(module, "VERSION", 3)
    content = encode_manifest(CheckpointManifest(1, 1, 0.0, {}, {}, {}, {}, {}, {}))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="of version 3; this program reads version 2"):
        parse_manifest(content)


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path):
    storage = open_storage(f"file://{tmp_path}")
    storage.put("a/b", b"old")
    storage.put("a/b", b"newer")
    assert storage.read("a/b") == b"newer" and storage.names("a") == ["b"] and storage.size("a/b") == 5
    view = memoryview(bytearray(10))
    assert storage.read_into("a/b", 2, view) == 3 and bytes(view[:3]) == b"wer"
    storage.rename("a", "c")
    assert storage.names() == ["c"] and storage.size("a/b") is None and storage.names("nowhere") == []
    storage.remove("c")
    storage.remove("c")
    assert storage.names() == []


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "s4://x"])
def test_a_scheme_that_is_unknown_is_refused_in_one_line(url):
    with pytest.raises(BadInputError, match=r"checkpoint\.url = \".*\": cannot be opened") as caught:
        open_storage(url)
    assert "\n" not in str(caught.value)


def test_messages_bring_bytes_and_descriptors_and_a_closed_line_is_reported():
    one, other = (SocketChannel(end) for end in socket.socketpair())
    reading, writing = os.pipe()
    one.send({"op": "x"}, b"payload", [writing])
    message, payload, (descriptor,) = other.receive()
    assert message == {"op": "x"} and bytes(payload) == b"payload"
    os.write(descriptor, b"!")
    assert os.read(reading, 1) == b"!"
    for each in (reading, writing, descriptor):
        os.close(each)
    one.close()
    with pytest.raises(Closed):
        other.receive()
    with pytest.raises(Closed):
        for _ in range(2):
            other.send({})
    other.close()


def test_the_metadata_are_what_the_classes_of_torch_give():
    """The file is made without them. What a release of torch adds to them shows here."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    def shard(name: str, full: tuple[int, ...], dtype: str, row: int, shape: tuple[int, ...]) -> StoredShard:
        offsets = (row, 0)[: len(full)]
        return StoredShard(name, full, dtype, offsets, shape, 8, 0, b"h" * 3, b"t" * 2)

    own = [shard("w\nc", (4, 2), "bfloat16", 0, (2, 2)), shard("b", (), "float32", 0, ())]
    found = pickle.loads(make_metadata([own, [shard("w\nc", (4, 2), "bfloat16", 2, (2, 2))]]))
    sizes = [torch.Size(one) for one in ((4, 2), (2, 2), (0, 0), (2, 0), ())]
    full, half, first, second, scalar = sizes
    chunks = [ChunkStorageMetadata(first, half), ChunkStorageMetadata(second, half)]
    tensors = {
        "w\nc": TensorStorageMetadata(TensorProperties(torch.bfloat16), full, chunks),
        "b": TensorStorageMetadata(
            TensorProperties(torch.float32), scalar, [ChunkStorageMetadata(scalar, scalar)]
        ),
    }
    places = {
        MetadataIndex("w\nc", first, 0): _StorageInfo("__0_0.distcp", 0, 13),
        MetadataIndex("b", scalar, 0): _StorageInfo("__0_0.distcp", 13, 13),
        MetadataIndex("w\nc", second, 1): _StorageInfo("__1_0.distcp", 0, 13),
    }
    expected = Metadata(tensors, storage_data=places)
    assert found == expected
    assert [index.index for index in found.storage_data] == [0, 0, 1]
