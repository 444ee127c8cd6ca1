"""If these fail, a damaged corpus is trained on, or the wrong shard is blamed."""

import time
from pathlib import Path

import pytest
from tiny_corpora import make_corpus

from myriad.data import block_hashes
from myriad.data.block_hashes import verify_corpus
from myriad.data.indexed import IndexedWriter, token_type
from myriad.errors import BadInputError


@pytest.mark.slow
def test_a_flipped_byte_anywhere_is_found_and_its_file_named(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=8)
    for path in sorted(corpus.iterdir()):
        whole = path.read_bytes()
        stride = 3 if path.suffix in (".bin", ".idx") else 97
        for place in range(0, len(whole), stride):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            assert [problem.file for problem in verify_corpus(corpus)] == [path.name], (path, place)
        path.write_bytes(whole)
    assert verify_corpus(corpus) == []


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=8)
    path = corpus / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :])
        assert [problem.file for problem in verify_corpus(corpus)] == ["manifest.json"], place


def test_truncated_missing_and_added_files_are_named(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=8)
    for name in ("train-00000.bin", "validation-00000.idx", "tokenizer.json"):
        path = corpus / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert [problem.file for problem in verify_corpus(corpus)] == [name]
        path.unlink()
        assert [tuple(problem) for problem in verify_corpus(corpus)] == [(name, "is missing")]
        path.write_bytes(whole)
    with IndexedWriter(corpus / "train-00001", token_type(300)) as writer:
        writer.add([1])
    assert [problem.what for problem in verify_corpus(corpus)] == ["is not part of the corpus"] * 2


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=8)
    heard: list[tuple[int, int]] = []
    verify_corpus(corpus, lambda done, total: heard.append((done, total)))
    assert heard[-1][0] == heard[-1][1] > 0


def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no manifest\.json"):
        verify_corpus(tmp_path)


def test_an_interrupt_does_not_wait_for_files_that_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, begun = make_corpus(tmp_path), list[str]()

    def check(path: Path, _: object) -> None:
        begun.append(path.name)
        time.sleep(0.02)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(block_hashes, "_check_file", check)
    monkeypatch.setattr(block_hashes.os, "cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        verify_corpus(corpus, interrupt)
    assert len(begun) < 4 < len(list(corpus.glob("*"))), begun
