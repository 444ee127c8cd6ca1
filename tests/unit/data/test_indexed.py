"""If these fail, Megatron's corpora do not open here or ours there, or a damaged shard is read as whole."""

import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from myriad.data.indexed import IndexedShard, IndexedWriter, token_type
from myriad.errors import BadInputError

SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
DOCUMENTS = st.lists(st.lists(st.integers(0, 299), max_size=20), max_size=8)


def write(prefix: Path, documents: list[list[int]], vocabulary: int = 300) -> IndexedShard:
    with IndexedWriter(prefix, token_type(vocabulary)) as writer:
        for document in documents:
            writer.add(document)
    return IndexedShard(prefix)


def read_as_megatron(prefix: Path) -> list[NDArray[np.generic]]:
    """megatron/core/datasets/indexed_dataset.py, `_IndexReader`, step by step."""
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack("<Q", raw[9:17]) == (1,)
    dtype = {4: np.int32, 8: np.uint16}[struct.unpack("<B", raw[17:18])[0]]
    sequences, documents = struct.unpack("<Q", raw[18:26])[0], struct.unpack("<Q", raw[26:34])[0]
    lengths = np.frombuffer(raw, np.int32, sequences, 34)
    pointers = np.frombuffer(raw, np.int64, sequences, 34 + lengths.nbytes)
    starts = np.frombuffer(raw, np.int64, documents, 34 + lengths.nbytes + pointers.nbytes)
    assert starts.tolist() == list(range(sequences + 1))
    data = prefix.with_suffix(".bin").read_bytes()
    return [np.frombuffer(data, dtype, n, p) for n, p in zip(lengths, pointers, strict=True)]


@SAME_FOLDER
@given(DOCUMENTS, st.sampled_from([300, 100_000]))
def test_what_is_written_is_read_back_here_and_by_megatron(
    tmp_path: Path, documents: list[list[int]], vocabulary: int
) -> None:
    shard = write(tmp_path / "one", documents, vocabulary)
    assert [shard.document(number).tolist() for number in range(shard.num_documents)] == documents
    assert [document.tolist() for document in read_as_megatron(tmp_path / "one")] == documents
    assert shard.tokens.tolist() == list(chain(*documents))
    assert shard.check_index() is None


def test_a_document_of_several_sequences_is_read_whole(tmp_path: Path) -> None:
    tokens = np.arange(10, dtype="<i4")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    lengths, pointers = np.array([4, 3, 3], "<i4"), np.array([0, 16, 28], "<i8")
    documents = np.array([0, 2, 3], "<i8")
    (tmp_path / "m.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    (tmp_path / "m.bin").write_bytes(tokens.tobytes())
    shard = IndexedShard(tmp_path / "m")
    assert shard.num_documents == 2
    assert shard.document(0).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert shard.document(1).tolist() == [7, 8, 9]


@SAME_FOLDER
@given(DOCUMENTS, DOCUMENTS)
def test_shards_laid_end_to_end_are_the_shard_of_all_documents(
    tmp_path: Path, first: list[list[int]], second: list[list[int]]
) -> None:
    parts = [write(tmp_path / "a", first), write(tmp_path / "b", second)]
    with IndexedWriter(tmp_path / "both", token_type(300)) as writer:
        for part in parts:
            writer.add_shard(part, block_tokens=7)
    write(tmp_path / "whole", first + second)
    for suffix in (".bin", ".idx"):
        both, whole = tmp_path / f"both{suffix}", tmp_path / f"whole{suffix}"
        assert both.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_shard_cut_anywhere_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "shard-7", [[1, 2, 3], [4]])
    path = tmp_path / f"shard-7{suffix}"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInputError, match=f"shard-7{suffix}"):
            IndexedShard(tmp_path / "shard-7")
    path.unlink()
    with pytest.raises(BadInputError, match="is missing"):
        IndexedShard(tmp_path / "shard-7")


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    path = tmp_path / "a.idx"
    whole = path.read_bytes()
    for place in (0, 9, 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(BadInputError, match=r"a\.idx"):
            IndexedShard(tmp_path / "a")


def test_a_shard_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        with IndexedWriter(tmp_path / "a", token_type(300)) as writer:
            writer.add([1, 2])
            assert not (tmp_path / "a.bin").exists()
            raise RuntimeError
    assert list(tmp_path.iterdir()) == []
