"""If these fail, the default job trains on more than the standard library, or validates on what it learnt."""

from pathlib import Path

import pytest

from myriad.data import corpus_cache
from myriad.data.corpus_cache import (
    VALIDATION_SHARE,
    Document,
    embedded_documents,
    embedded_key,
    prepare_embedded,
    split_documents,
)
from myriad.data.corpus_manifest import read_manifest
from myriad.errors import BadInputError


def library(root: Path) -> Path:
    for name in ("os.py", "json/tool.py", "test/test_os.py", "site-packages/numpy.py", "encodings/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 50)
    (root / "table.py").write_text("T = [" + "12345, " * 3000 + "]")
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data/topics.py").write_text("topics = {'if': 'The if\\n', 'for': 'The for\\n'}\n")
    return root


def test_only_the_library_itself_is_read(tmp_path: Path) -> None:
    names = [document.name for document in embedded_documents(library(tmp_path))]
    assert names == ["json/tool.py", "os.py", "pydoc_data/topics.py"]


def test_the_language_reference_is_prose(tmp_path: Path) -> None:
    texts = {document.name: document.text for document in embedded_documents(library(tmp_path))}
    assert texts["pydoc_data/topics.py"] == "The if\n\n\nThe for\n"


def test_this_python_brings_megabytes() -> None:
    total = sum(len(document.text) for document in embedded_documents())
    assert total > 3_000_000


def test_the_key_follows_the_files(tmp_path: Path) -> None:
    before = embedded_key(library(tmp_path))
    assert embedded_key(tmp_path) == before
    (tmp_path / "os.py").write_text("other")
    assert embedded_key(tmp_path) != before


def test_held_out_documents_are_whole_and_about_their_share() -> None:
    documents = [Document(f"d{number}", "x" * (100 + 37 * number % 400)) for number in range(500)]
    train, validation = split_documents(documents)
    assert sorted(train + validation) == sorted(documents)
    share = sum(len(one.text) for one in validation) / sum(len(one.text) for one in documents)
    assert 0.9 * VALIDATION_SHARE < share <= VALIDATION_SHARE
    assert split_documents(list(reversed(documents)))[1] == list(reversed(validation))


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    documents = [Document(f"d{number}", f"text number {number} " * 40) for number in range(100)]
    monkeypatch.setattr(corpus_cache, "embedded_documents", lambda: documents)
    return tmp_path / "cache"


def test_the_cache_is_made_once(small_library: Path) -> None:
    stages: list[str] = []
    folder = prepare_embedded(small_library, 300, stages.append)
    assert stages == ["reading the standard library", "training the tokenizer", "tokenizing"]
    assert prepare_embedded(small_library, 300, stages.append) == folder and len(stages) == 3
    assert prepare_embedded(small_library, 301) != folder
    assert read_manifest(folder).num_documents("validation") > 0


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_a_damaged_cache_is_made_again(small_library: Path, damage: str) -> None:
    folder = prepare_embedded(small_library, 300)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    victim = folder / ("manifest.json" if damage == "manifest" else "train-00000.bin")
    victim.write_bytes(whole[victim.name][:-1]) if damage != "remove" else victim.unlink()
    prepare_embedded(small_library, 300)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="XDG_CACHE_HOME"):
        prepare_embedded(tmp_path / "file" / "cache", 300)
